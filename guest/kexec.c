// SPDX-License-Identifier: GPL-2.0
/*
 * kexec: starts the kernel /kz/kernel with the initial RAM file system of this boot, which runs the
 * same command again. The kernel command line tells the two boots apart. With --crash, this kernel
 * crashes, and /kz/kernel starts in the memory of crashkernel=.
 */
#include "common.h"

#include <sys/reboot.h>
#include <sys/syscall.h>

#ifndef SYS_kexec_file_load
#define SYS_kexec_file_load -1		/* i386 has none: ENOSYS */
#endif

#define KEXEC_FILE_ON_CRASH 2	/* linux/kexec.h */

#define INITRD "/sys/firmware/initrd"

static const char usage[] =
"usage: kexec [options]\n"
"Starts /kz/kernel with " INITRD ", which retain_initrd keeps. Does not return.\n"
"Options:\n"
"  --append TEXT  add this to the kernel command line of this boot\n"
"  --crash        load it for a crash, and crash\n"
"  --help         this text\n"
"Exit: 2 bad usage, 3 the machine cannot do it.\n";

int main(int argc, char **argv)
{
	const char *append = "";
	char line[4096];
	int kernel, initrd;
	bool crash = false;
	ssize_t length;
	const struct kz_option options[] = {
		{ "append", .text = &append },
		{ "crash", .flag = &crash },
		{ 0 },
	};

	kz_only_options(argc, argv, "kexec", usage, options);
	length = kz_read_file("/proc/cmdline", line, sizeof(line));
	if (length <= 0)
		kz_fail("cannot read /proc/cmdline");
	line[strcspn(line, "\n")] = '\0';
	if (strlen(line) + strlen(append) + 2 > sizeof(line))
		kz_die(KZ_USAGE, "--append: too long; see kexec --help");
	strcat(strcat(line, " "), append);
	kernel = open("/kz/kernel", O_RDONLY | O_CLOEXEC);
	if (kernel < 0)
		kz_fail("cannot open /kz/kernel");
	initrd = open(INITRD, O_RDONLY | O_CLOEXEC);
	if (initrd < 0)
		kz_fail("cannot open " INITRD);
	if (syscall(SYS_kexec_file_load, kernel, initrd, strlen(line) + 1, line, crash ? KEXEC_FILE_ON_CRASH : 0))
		kz_fail("cannot load /kz/kernel");
	if (crash)
		kz_write_file("/proc/sysrq-trigger", "c");
	else
		reboot(RB_KEXEC);
	kz_fail("cannot start /kz/kernel");
}
