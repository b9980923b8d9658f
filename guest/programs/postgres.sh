#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# PostgreSQL, pgbench with 200 transactions
# packages: postgresql
data=/srv/postgres
quiet() { "$@" >/srv/postgres.log 2>&1 || { tail /srv/postgres.log && exit 1; }; }
as() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
export PATH PGHOST=$data PGDATABASE=postgres LC_ALL=C
cd /
if [ "${1:-}" = prepare ]; then
	mkdir $data
	chown postgres:postgres $data
	quiet as initdb -D $data --no-sync
	echo "unix_socket_directories = '$data'" >>$data/postgresql.conf
	echo "listen_addresses = ''" >>$data/postgresql.conf
	exit
fi
quiet as pg_ctl -D $data -l $data/log -w -t 600 start
quiet as pgbench -i -q -s 2
quiet as pgbench -t 200 --random-seed=1
as psql -Atc 'select count(*), sum(delta) from pgbench_history' -c 'select sum(abalance) from pgbench_accounts'
quiet as pg_ctl -D $data -m fast -w -t 600 stop
