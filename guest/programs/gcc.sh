#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# gcc compiles three files of stb
# packages: gcc libc6-dev libstb-dev
if [ "${1:-}" = prepare ]; then
	mkdir -p /srv/gcc
	for name in IMAGE_WRITE RECT_PACK DS; do
		file=$(echo "$name" | tr A-Z a-z)
		case $name in DS) switch=STB_DS ;; *) switch=STB_$name ;; esac
		printf '#define %s_IMPLEMENTATION\n#include <stb/stb_%s.h>\n' "$switch" "$file" >"/srv/gcc/$file.c"
	done
	exit
fi
cd /srv/gcc
rm -f ./*.o
for file in *.c; do
	gcc -O1 -c "$file"
done
sha256sum ./*.o
