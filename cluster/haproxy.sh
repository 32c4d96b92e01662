#!/bin/sh
# What Ray Serve starts as HAProxy, with `-db -f FILE ...`: for the configuration it wrote there is no knob for these.
# Its metrics and statistics go, which would listen on all interfaces; one address has its share of the connections.
sed -i \
    -e '/^frontend prometheus$/,/^frontend http_frontend$/ { /^frontend http_frontend$/ !d }' \
    -e '/^listen stats$/,$ d' \
    -e "/^frontend http_frontend$/ a\\
    stick-table type ipv6 size 100k expire 1m store conn_cur\\
    tcp-request connection track-sc0 src,ipmask(32,64)\\
    tcp-request connection reject if { sc0_conn_cur gt $MNEME_CONNECTIONS_PER_ADDRESS }" \
    "$3" && exec "$MNEME_HAPROXY" "$@"
