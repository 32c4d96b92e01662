#!/bin/sh
# What Ray Serve starts as HAProxy, with `-db -f FILE ...`: for the configuration it wrote there is no knob for these.
# Its metrics and statistics go, which would listen on all interfaces; one address has its share of the connections.
# A HEAD with a body and HTTP/2 are refused: there an early answer ends without its connection, and HAProxy would wait
# for a body that may never come.
set -eu
file= before=
for argument in "$@"; do
    if [ "$before" = -f ]; then file=$argument; fi
    before=$argument
done
awk -v share="$MNEME_CONNECTIONS_PER_ADDRESS" '
    /^[a-z]/ { section = $0 }
    section == "frontend prometheus" || section == "listen stats" { next }
    section == "frontend http_frontend" && $1 == "bind" { $0 = $0 " proto h1"; is_bound = 1 }
    { print }
    $0 == "frontend http_frontend" {
        print "    stick-table type ipv6 size 100k expire 1m store conn_cur"
        print "    tcp-request connection track-sc0 src,ipmask(32,64)"
        print "    tcp-request connection reject if { sc0_conn_cur gt " share " }"
        print "    acl has_body req.hdr(transfer-encoding) -m found"
        print "    acl has_body req.hdr(content-length) -m reg [1-9]"
        print "    http-request deny deny_status 400 if METH_HEAD has_body"
    }
    END { exit !is_bound }
' "$file" >"$file.edited" || { echo "haproxy.sh: no bind in a frontend http_frontend in '$file'" >&2; exit 1; }
mv "$file.edited" "$file"
exec "$MNEME_HAPROXY" "$@"
