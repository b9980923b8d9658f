// SPDX-License-Identifier: GPL-2.0
/*
 * The first program of a guest: mounts what programs expect, loads the modules a
 * distribution's kernel needs, runs one command with its output on channels of its
 * own, reports how it ended, and switches the machine off.
 *
 * /kz/argv     the command, each argument ended by a NUL
 * /kz/mode     "ports" (named virtio-serial ports), "ssl" (User-Mode Linux) or "tty";
 *              " in" after it when the host sends input to the command
 * /kz/modules  module files to load, in order
 *
 * On the control channel: "ready", then "taint N" and "exit N" (128 + signal if killed).
 * Without a channel that the mode needs it runs no command, and switches the machine off.
 */
#include "common.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <termios.h>

#define PORTS "/sys/class/virtio-ports"

static void complain(const char *what, const char *name)
{
	fprintf(stderr, "init: %s %s: %s; %s\n", what, name, strerror(errno), kz_help(errno));
}

static void switch_off(void)
{
	sync();
	/* A PC without ACPI halts when it is to be switched off. */
	if (!access("/sys/firmware/acpi", F_OK) || access("/sys/bus/pci", F_OK))
		reboot(RB_POWER_OFF);
	/* The lab's machines end at a reset, too. */
	reboot(RB_AUTOBOOT);
}

static void mount_at(const char *type, const char *dir, const char *options)
{
	mkdir(dir, 0755);
	/* A kernel may lack a filesystem: the command that needs it fails. */
	mount(type, dir, type, 0, options);
}

static void mount_all(void)
{
	mount_at("proc", "/proc", NULL);
	mount_at("sysfs", "/sys", NULL);
	mount_at("devtmpfs", "/dev", NULL);
	mount_at("devpts", "/dev/pts", NULL);
	mount_at("tmpfs", "/dev/shm", NULL);
	mount_at("hugetlbfs", "/dev/hugepages", NULL);
	mount_at("tmpfs", "/tmp", NULL);
	mount_at("tmpfs", "/run", NULL);
	mount_at("debugfs", "/sys/kernel/debug", NULL);
	mount_at("tracefs", "/sys/kernel/tracing", NULL);
	mount_at("cgroup2", "/sys/fs/cgroup", NULL);
}

static void load_modules(void)
{
	static char list[65536];
	char *name, *rest;

	if (kz_read_file("/kz/modules", list, sizeof(list)) <= 0)
		return;
	for (name = strtok_r(list, "\n", &rest); name; name = strtok_r(NULL, "\n", &rest)) {
		int fd = open(name, O_RDONLY | O_CLOEXEC);

		if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST))
			complain("cannot load", name);
		if (fd >= 0)
			close(fd);
	}
}

/*
 * A virtio-serial port by the name the host gave it, or -1. errno is ENOENT without the
 * driver, and ENXIO if the driver found no such port.
 */
static int open_port(const char *wanted)
{
	char path[512], name[64];
	struct dirent *entry;
	DIR *dir = opendir(PORTS);
	int fd = -1;

	if (!dir)
		return -1;
	while (fd < 0 && (entry = readdir(dir))) {
		snprintf(path, sizeof(path), PORTS "/%s/name", entry->d_name);
		if (kz_read_file(path, name, sizeof(name)) <= 0)
			continue;
		name[strcspn(name, "\n")] = '\0';
		if (strcmp(name, wanted))
			continue;
		snprintf(path, sizeof(path), "/dev/%s", entry->d_name);
		fd = open(path, O_RDWR | O_CLOEXEC);
	}
	closedir(dir);
	if (fd < 0)
		errno = ENXIO;
	return fd;
}

/* A read of a port returns end-of-file until the kernel learns that the host opened its end. */
static int is_connected(int fd)
{
	struct pollfd port = { .fd = fd };

	return poll(&port, 1, 0) >= 0 && !(port.revents & POLLHUP);
}

static int open_terminal(const char *name)
{
	return open(name, O_RDWR | O_CLOEXEC);
}

/*
 * The ports of virtio-serial appear one by one, some time after its driver. A command whose
 * output nobody gets is not run.
 */
static int wait_for(int (*open_it)(const char *name), const char *name)
{
	const struct timespec pause = { .tv_nsec = 2 * 1000 * 1000 };
	int fd = -1, error = 0;

	for (int i = 0; i < 5000; i++) {
		if (fd < 0) {
			fd = open_it(name);
			error = errno;
		}
		if (fd >= 0 && is_connected(fd))
			return fd;
		nanosleep(&pause, NULL);
	}
	if (fd >= 0)
		error = ENOTCONN;
	errno = error;
	complain("no channel", name);
	if (fd < 0)
		switch_off();
	return fd;
}

static int open_raw(const char *name)
{
	struct termios settings;
	int fd = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);

	if (fd < 0)
		complain("no channel", name);
	else if (!tcgetattr(fd, &settings)) {
		cfmakeraw(&settings);
		tcsetattr(fd, TCSANOW, &settings);
	}
	return fd;
}

struct channels {
	int control, out, err, in;
};

static struct channels open_channels(const char *mode)
{
	struct channels found = { -1, -1, -1, -1 };
	int talks = !!strstr(mode, " in");

	if (!strncmp(mode, "ports", 5)) {
		found.control = wait_for(open_port, "kz.ctl");
		found.out = wait_for(open_port, "kz.out");
		found.err = wait_for(open_port, "kz.err");
		if (talks)
			found.in = wait_for(open_port, "kz.in");
	} else if (!strncmp(mode, "ssl", 3)) {
		found.control = open_raw("/dev/ttyS0");
		found.out = open_raw("/dev/ttyS1");
		found.err = open_raw("/dev/ttyS2");
		if (talks)
			found.in = open_raw("/dev/ttyS3");
	} else if (!strncmp(mode, "none", 4)) {
		/* The other end is never opened, so do not wait for it. */
		found.out = STDOUT_FILENO;
		found.err = STDERR_FILENO;
	} else {
		found.control = wait_for(open_port, "kz.ctl");
		found.in = wait_for(open_terminal, "/dev/hvc0");
		found.out = found.in;
		found.err = found.in;
	}
	if (found.in < 0)
		found.in = open("/dev/null", O_RDONLY | O_CLOEXEC);
	return found;
}

static void tell(int fd, const char *word, long value)
{
	char line[64];
	int length = snprintf(line, sizeof(line), "%s %ld\n", word, value);

	if (fd >= 0 && write(fd, line, length) != length)
		complain("cannot report", word);
}

static void run_command(const struct channels *to)
{
	static char text[1 << 20];
	static char *argv[4096];
	ssize_t size = kz_read_file("/kz/argv", text, sizeof(text));
	int count = 0;

	for (char *at = text; size > 0 && at < text + size && count < 4095; at += strlen(at) + 1)
		argv[count++] = at;
	if (!count) {
		argv[0] = "/bin/sh";
		count = 1;
	}
	setsid();
	dup2(to->in, 0);
	dup2(to->out, 1);
	dup2(to->err, 2);
	/* Only a terminal is the controlling one. */
	if (to->in == to->out && isatty(0))
		ioctl(0, TIOCSCTTY, 0);
	setenv("PATH", "/bin:/sbin:/usr/bin:/usr/sbin:/", 1);
	setenv("HOME", "/", 1);
	setenv("TERM", "linux", 1);
	execvp(argv[0], argv);
	fprintf(stderr, "init: cannot run %s: %s; %s\n", argv[0], strerror(errno),
		errno == ENOENT ? "add it to the guest (--add)" : kz_help(errno));
	_exit(errno == ENOENT ? 127 : 126);
}

static int collect(pid_t child)
{
	int status;
	pid_t gone;

	/* The first process collects all orphans, too. */
	while ((gone = wait(&status)) != child)
		if (gone < 0 && errno != EINTR)
			return 126;
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int main(void)
{
	char mode[32] = "", taint[32] = "";
	struct channels to;
	pid_t child;
	int status;

	mount_all();
	status = open("/dev/console", O_RDWR);
	if (status >= 0) {
		dup2(status, 0);
		dup2(status, 1);
		dup2(status, 2);
	}
	setvbuf(stderr, NULL, _IOLBF, 0);
	load_modules();
	kz_read_file("/kz/mode", mode, sizeof(mode));
	to = open_channels(mode);
	tell(to.control, "ready", 0);

	child = fork();
	if (!child)
		run_command(&to);
	status = child < 0 ? 126 : collect(child);
	kill(-1, SIGKILL);

	if (kz_read_file("/proc/sys/kernel/tainted", taint, sizeof(taint)) > 0)
		tell(to.control, "taint", atol(taint));
	tell(to.control, "exit", status);
	tcdrain(to.control);
	switch_off();
	return 0;
}
