#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# SQLite, 60000 rows and an index
# packages: sqlite3
[ "${1:-}" != prepare ] || exit 0
rm -f /srv/sqlite.db
sqlite3 /srv/sqlite.db <<'END'
create table words (id integer primary key, word text, value int);
insert into words
with recursive n(i) as (select 1 union all select i + 1 from n where i < 60000)
select i, printf('word %d of the table', i * 7919 % 60013), i * i % 9973 from n;
create index by_word on words (word);
select count(*), sum(value), min(word), max(word) from words;
select group_concat(word) from (select word from words order by word limit 5 offset 30000);
END
