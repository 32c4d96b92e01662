{{- define "mneme.name" -}}
{{- ternary .Release.Name (printf "%s-mneme" .Release.Name) (contains "mneme" .Release.Name) -}}
{{- end -}}

{{/* Ours, as KubeRay's name a RayCluster that an upgrade replaces. */}}
{{- define "mneme.selector" -}}
app.kubernetes.io/name: mneme
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mneme.labels" -}}
{{ include "mneme.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "mneme.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* The product's configuration, with what the pods decide. */}}
{{- define "mneme.args" -}}
{{- $args := deepCopy .Values.config -}}
{{- if dig "cache" "disk" false $args }}{{ $_ := set $args.cache.disk "folder" "/kv" }}{{ end -}}
{{- if .Values.keys.secret }}{{ $_ := set $args.http "keys_file" (printf "/etc/mneme/%s" .Values.keys.key) }}{{ end -}}
{{- toYaml $args -}}
{{- end -}}

{{/* Worker pods, as JSON: for the fewest and the most engine replicas of all models; an ingress needs one. */}}
{{- define "mneme.pods" -}}
{{- $min := 0 }}{{ $max := 0 -}}
{{- range prepend (.Values.config.models | default list) .Values.config -}}
  {{- if .autoscale -}}
    {{- $min = add $min (get .autoscale "min" | default 0) }}{{ $max = add $max (.autoscale.max | default 1) -}}
  {{- else -}}
    {{- $min = add $min .replicas }}{{ $max = add $max .replicas -}}
  {{- end -}}
{{- end -}}
{{- $per := float64 .Values.worker.enginesPerPod -}}
{{- dict "min" (max 1 (ceil (divf $min $per))) "max" (max 1 (ceil (divf $max $per))) | toJson -}}
{{- end -}}

{{/* Of chunks, and of session logs: cachetier/config.py has their bound. */}}
{{- define "mneme.kvBytes" -}}
{{- with .Values.config.cache }}{{ mulf 1.1 (addf .disk.capacity_bytes 1073741824) | ceil | int64 }}{{ end -}}
{{- end -}}

{{- define "mneme.hostPath" -}}
{{- .Values.kv.hostPath | default (printf "/var/lib/mneme/%s-%s" .Release.Namespace .Release.Name) -}}
{{- end -}}

{{/* Refuses what could be rendered and would not work. */}}
{{- define "mneme.check" -}}
{{- $v := .Values }}{{ $c := $v.config }}{{ $disk := dig "cache" "disk" false $c }}{{ $pods := include "mneme.pods" . | fromJson -}}
{{- $name := include "mneme.name" . -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]{0,46}$" $name) -}}
  {{- fail (printf "%s: KubeRay takes names of at most 47 letters, digits and -, a letter first" $name) -}}
{{- end -}}
{{- range $i, $each := prepend ($c.models | default list) $c -}}
  {{- $path := ternary "config" (printf "config.models[%d]" (sub $i 1)) (eq $i 0) -}}
  {{- if and $each.replicas $each.autoscale }}{{ fail (printf "%s.replicas: set %s.autoscale to null beside it" $path $path) }}{{ end -}}
  {{- with $each.autoscale -}}
    {{- if lt (int .max) (int .min) }}{{ fail (printf "%s.autoscale.max: must be at least min, %d (got %d)" $path (int .min) (int .max)) }}{{ end -}}
  {{- end -}}
  {{- if not (or $each.replicas $each.autoscale) }}{{ fail (printf "%s: replicas or autoscale must say how many engines, as pods follow" $path) }}{{ end -}}
  {{- if not (or $each.cpus_per_replica $each.gpus_per_replica) -}}
    {{- fail (printf "%s.cpus_per_replica: must be over 0, or Ray places engines on the head, which has no folder for KV" $path) -}}
  {{- end -}}
{{- end -}}
{{- if not $c.ingress.cpus }}{{ fail "config.ingress.cpus: must be over 0, or Ray places an ingress on the head" }}{{ end -}}
{{- $least := addf $c.ingress.drain_s $c.start_timeout_s 60 -}}
{{- if lt (float64 $v.worker.terminationGracePeriodSeconds) $least -}}
  {{- fail (printf "worker.terminationGracePeriodSeconds: must be at least config.ingress.drain_s, config.start_timeout_s and 60, %v, or a pod that ends cuts streams off (got %v)" $least $v.worker.terminationGracePeriodSeconds) -}}
{{- end -}}
{{- if and (eq $v.kv.type "claim") (gt $pods.max 1.0) -}}
  {{- fail (printf "kv.type: claim is one folder, and %v pods would be on it; hostPath gives each node its own" $pods.max) -}}
{{- end -}}
{{- if and (eq $v.upgradeStrategy "NewCluster") (has $v.kv.type (list "hostPath" "claim")) -}}
  {{- fail (printf "upgradeStrategy: with NewCluster an old and a new pod would be on one folder of kv.type %s" $v.kv.type) -}}
{{- end -}}
{{- if and (eq $v.kv.type "claim") (not $v.kv.claim) }}{{ fail "kv.claim: must name the PersistentVolumeClaim of kv.type claim" }}{{ end -}}
{{- if and $v.model.claim $v.model.download }}{{ fail "model: claim and download exclude each other" }}{{ end -}}
{{- if and (or $v.model.claim $v.model.download) (not (hasPrefix "/models/" $c.model)) -}}
  {{- fail (printf "config.model: must be below /models, where model.claim or model.download puts it (got %s)" $c.model) -}}
{{- end -}}
{{- if and (eq (dig "engine" "device" "auto" $c) "cuda") (not (dig "limits" "nvidia.com/gpu" false $v.worker.resources)) -}}
  {{- fail "worker.resources: limits must have nvidia.com/gpu where config.engine.device is cuda" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) }}{{ fail "httpRoute.parentRefs: must name a Gateway" }}{{ end -}}
{{- if and $v.redis.passwordSecret (not $v.redis.address) }}{{ fail "redis.address: must be given beside its password" }}{{ end -}}
{{- end -}}

{{/* What head and workers have alike: replicas must find the same wherever Ray puts them. */}}
{{- define "mneme.env" -}}
{{- $defaults := "leastconn\n    no option splice-request\n    timeout http-request 10s\n    timeout http-keep-alive 10s" -}}
# As `mneme serve` sets them: cluster/run/environment.py says why.
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /usr/local/bin/mneme-haproxy} # docker/Dockerfile puts both there
- {name: MNEME_HAPROXY, value: /usr/local/bin/haproxy}
- {name: MNEME_CONNECTIONS_PER_ADDRESS, value: {{ int64 .Values.config.http.max_connections_per_address | quote }}}
- {name: RAY_SERVE_HAPROXY_NBTHREAD, value: "2"}
- {name: RAY_SERVE_HAPROXY_METRICS_ENABLED, value: "0"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ ceil .Values.config.ingress.drain_s | int64 | quote }}}
- {name: RAY_SERVE_HAPROXY_TUNE_BUFSIZE, value: "65536"}
- {name: RAY_SERVE_HAPROXY_BALANCE_ALGORITHM, value: {{ toJson $defaults }}}
- {name: RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S, value: "65"}
- {name: RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S, value: "5"}
- {name: RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL, value: "12"}
- {name: RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "5"} # HAProxies of other pods learn of a stop
- {name: RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S, value: "1"}
- {name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, value: "1"}
- {name: RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S, value: "1"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "mneme.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "mneme.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: ["ALL"]
{{- end -}}

{{/* The container's resources, with ephemeral storage of what lies on the node's disk. */}}
{{- define "mneme.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- $requests := merge (dict "ephemeral-storage" (int64 .bytes | toString)) ($resources.requests | default dict) -}}
{{- toYaml (set $resources "requests" $requests) -}}
{{- end -}}

{{/* Volumes of head and workers: shared memory for the object store, Ray's folder, keys. */}}
{{- define "mneme.volumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ mulf 1.25 .group.objectStoreBytes | ceil | int64 | quote }}
- name: ray
  emptyDir: {}
{{- if .root.Values.keys.secret }}
- name: keys
  secret:
    secretName: {{ .root.Values.keys.secret }}
{{- end }}
{{- end -}}

{{- define "mneme.mounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: ray, mountPath: /tmp}
{{- if .Values.keys.secret }}
- {name: keys, mountPath: /etc/mneme, readOnly: true}
{{- end }}
{{- end -}}
