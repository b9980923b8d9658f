#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# crun starts ten containers
# packages: crun busybox-static
if [ "${1:-}" = prepare ]; then
	mkdir -p /srv/container/rootfs/bin
	cp /bin/busybox /srv/container/rootfs/bin/sh
	cd /srv/container
	crun spec
	# No terminal, and a command that ends.
	sed -i -e 's/"terminal": true/"terminal": false/' -e 's/^\([[:space:]]*\)"sh"$/\1"sh", "-c", "echo process $$ in a container"/' config.json
	grep -q 'in a container' config.json
	exit
fi
cd /srv/container
for number in 1 2 3 4 5 6 7 8 9 10; do
	# The guest's root is its initramfs, which pivot_root() cannot leave.
	crun run --no-pivot "kz$number"
done
