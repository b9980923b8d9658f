#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Redis filled with 200 MB, then BGSAVE
# packages: redis-server
[ "${1:-}" != prepare ] || exit 0
rm -rf /srv/redis
mkdir /srv/redis
cd /srv/redis
redis-server --port 0 --unixsocket socket --save '' --rdbcompression no --enable-debug-command yes \
	--loglevel warning --logfile log &
client="redis-cli -s socket"
until $client ping >/dev/null 2>&1; do sleep 0.2; done
$client debug populate 51200 key 4096
$client bgsave >/dev/null
until $client info persistence | grep -q rdb_bgsave_in_progress:0; do sleep 0.5; done
$client info persistence | grep -q rdb_last_bgsave_status:ok
$client dbsize
$client getrange key:7919 0 9
$client shutdown nosave
wait
stat -c 'at least 200 MB: %s' dump.rdb | awk '{ print $1, $2, $3, $4, ($5 >= 51200 * 4096) }'
