#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# QEMU microvm with KVM, to the login
# packages: qemu-system-x86 busybox-static cpio
if [ "${1:-}" = prepare ]; then
	mkdir -p /srv/microvm/root/bin /srv/microvm/root/dev /srv/microvm/root/proc
	cd /srv/microvm/root
	cp /bin/busybox bin/
	cat >init <<-'END'
		#!/bin/busybox sh
		busybox mount -t devtmpfs dev /dev
		busybox mount -t proc proc /proc
		echo "memory: $(busybox awk '/^MemTotal/ { print ($2 > 64000) }' /proc/meminfo)"
		busybox getty -L 115200 ttyS0 &
		busybox sleep 1
		busybox reboot -f
	END
	chmod 755 init
	find . | cpio -o -H newc --quiet >../initrd
	exit
fi
qemu-system-x86_64 -M microvm,rtc=on,kernel-irqchip=split -accel kvm -cpu host -m 96 -nodefaults -no-user-config \
	-no-reboot -display none -serial stdio -kernel /kz/kernel -initrd /srv/microvm/initrd \
	-append "console=ttyS0 quiet reboot=t panic=-1 no_timer_check tsc=reliable lpj=12000000" </dev/null >/srv/microvm/console
grep -a -o 'memory: 1' /srv/microvm/console
grep -a -o 'login:' /srv/microvm/console
