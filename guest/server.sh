#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Redis answers 100 requests, each to set another key to 1 MiB. Runs in the Debian of debian-disk.sh; prints the latencies.
rm -rf /srv/server
mkdir /srv/server
cd /srv/server
redis-server --port 0 --unixsocket socket --save '' --loglevel warning --logfile log &
client="redis-cli -s socket"
until $client ping >/dev/null 2>&1; do sleep 0.1; done
# Random keys: a key that is set again would free what it had.
redis-benchmark -s socket -c 1 -n 100 -d 1048576 -r 1000000000 -t set --csv >latencies
test "$($client dbsize)" = 100
$client shutdown nosave
wait
cat latencies
