/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Shared by the guest programs: messages, options, time, children, /proc/vmstat, JSON.
 * Each program is one static binary from one source, so all of it is static.
 */
#ifndef KZ_GUEST_COMMON_H
#define KZ_GUEST_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "exit_codes.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define KZ_MAYBE_UNUSED __attribute__((unused))
#define KZ_MB (1024UL * 1024UL)
#define KZ_HUGE (2UL * KZ_MB)

static const char *kz_program = "?";

static KZ_MAYBE_UNUSED void kz_die(int code, const char *fmt, ...)
	__attribute__((noreturn, format(printf, 2, 3)));

/* A message has three parts: what failed with the value, why, the command that helps. */
static KZ_MAYBE_UNUSED void kz_die(int code, const char *fmt, ...)
{
	va_list ap;

	fflush(stdout);
	fprintf(stderr, "%s: ", kz_program);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(code);
}

static KZ_MAYBE_UNUSED const char *kz_help(int error)
{
	switch (error) {
	case ENOMEM:
	case EAGAIN:
		return "give the guest more memory (--memory)";
	case EPERM:
	case EACCES:
		return "run it as root";
	case ENOENT:
	case ENOSYS:
	case ENODEV:
	case EOPNOTSUPP:
		return "boot a kernel that is built with it";
	}
	return "see the kernel log (dmesg)";
}

/* Ends the program because the machine failed: the second and the third part come from errno. */
#define kz_fail(fmt, ...) \
	kz_die(KZ_BROKEN, fmt ": %s; %s", ##__VA_ARGS__, strerror(errno), kz_help(errno))

static KZ_MAYBE_UNUSED uint64_t kz_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}

/* Returns a whole number in [min, max]; anything else ends the program. */
static KZ_MAYBE_UNUSED unsigned long kz_number(const char *option, const char *text,
					       unsigned long min, unsigned long max)
{
	unsigned long value;
	char *end;

	errno = 0;
	value = strtoul(text, &end, 0);
	if (errno || end == text || *end || *text == '-' || value < min || value > max)
		kz_die(KZ_USAGE, "--%s: '%s' is not a whole number from %lu to %lu; see %s --help",
		       option, text, min, max, kz_program);
	return value;
}

/* An option, by where its value goes: exactly one of the pointers is set. */
struct kz_option {
	const char *name;
	bool *flag;
	const char **text;
	unsigned long *number, min, max;
	unsigned int *choice;			/* the index of the value in choices */
	const char *const *choices;		/* ends with NULL */
};

static KZ_MAYBE_UNUSED void kz_set_option(const struct kz_option *option, const char *value)
{
	char names[256] = "";
	unsigned int i;

	if (option->flag) {
		*option->flag = true;
	} else if (option->text) {
		*option->text = value;
	} else if (option->number) {
		*option->number = kz_number(option->name, value, option->min, option->max);
	} else {
		for (i = 0; option->choices[i]; i++) {
			if (!strcmp(value, option->choices[i])) {
				*option->choice = i;
				return;
			}
			snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s",
				 i ? ", " : "", option->choices[i]);
		}
		kz_die(KZ_USAGE, "--%s: '%s' is not one of %s; see %s --help", option->name, value,
		       names, kz_program);
	}
}

/*
 * Reads the options, of which the last has no name; --help is always there. Returns the index of
 * the first argument that is no option.
 */
static KZ_MAYBE_UNUSED int kz_options(int argc, char **argv, const char *program, const char *usage,
				      const struct kz_option *options)
{
	struct option known[24] = { 0 };
	int n, opt, index = 0;

	kz_program = program;
	for (n = 0; options[n].name; n++)
		known[n] = (struct option){ options[n].name, !options[n].flag, NULL, 1 };
	known[n] = (struct option){ "help", no_argument, NULL, 2 };
	opterr = 0;
	while ((opt = getopt_long(argc, argv, "", known, &index)) != -1) {
		if (opt == 2) {
			fputs(usage, stdout);
			exit(KZ_OK);
		}
		if (opt != 1)
			kz_die(KZ_USAGE, "'%s': unknown option, or its value is missing; see %s --help",
			       argv[optind - 1], program);
		kz_set_option(&options[index], optarg);
	}
	return optind;
}

/* The same for programs that take options only. */
static KZ_MAYBE_UNUSED void kz_only_options(int argc, char **argv, const char *program,
					    const char *usage, const struct kz_option *options)
{
	int first = kz_options(argc, argv, program, usage, options);

	if (first < argc)
		kz_die(KZ_USAGE, "'%s': unexpected argument, options begin with --; see %s --help",
		       argv[first], program);
}

/* splitmix64: neighbouring states give unrelated numbers. */
static KZ_MAYBE_UNUSED uint64_t kz_mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

static KZ_MAYBE_UNUSED uint64_t kz_rng_state;

static KZ_MAYBE_UNUSED uint64_t kz_rng(void)
{
	return kz_mix(kz_rng_state++);
}

static KZ_MAYBE_UNUSED unsigned long kz_between(unsigned long low, unsigned long high)
{
	return low + kz_rng() % (high - low + 1);
}

static KZ_MAYBE_UNUSED bool kz_percent(unsigned int share)
{
	return kz_rng() % 100 < share;
}

/* Memory that is private and anonymous unless @flags say otherwise. */
static KZ_MAYBE_UNUSED void *kz_map(size_t bytes, int flags)
{
	void *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags ? flags :
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (mem == MAP_FAILED)
		kz_fail("cannot map %zu KiB", bytes / 1024);
	return mem;
}

static KZ_MAYBE_UNUSED pid_t kz_fork(void)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0)
		kz_fail("cannot fork");
	return pid;
}

/* Waits for a child and returns its status; @usage may be NULL. */
static KZ_MAYBE_UNUSED int kz_wait(pid_t pid, struct rusage *usage)
{
	int status;

	while (wait4(pid, &status, 0, usage) < 0)
		if (errno != EINTR)
			kz_fail("cannot wait for process %ld", (long)pid);
	return status;
}

/* The exit code of a measured child; one that was killed ends the program. */
static KZ_MAYBE_UNUSED int kz_wait_measured(pid_t pid, struct rusage *usage)
{
	int status = kz_wait(pid, usage);

	if (WIFSIGNALED(status))
		kz_die(KZ_BROKEN, "the measured child was killed by signal %d, perhaps memory is short; see the kernel log (dmesg)",
		       WTERMSIG(status));
	return WEXITSTATUS(status);
}

/* The arguments of this program with --worker after them, for a child that executes it. */
static KZ_MAYBE_UNUSED char **kz_worker_argv(int argc, char **argv)
{
	char **worker = calloc((size_t)argc + 2, sizeof(*worker));

	if (!worker)
		kz_fail("cannot copy %d arguments", argc);
	memcpy(worker, argv, (size_t)argc * sizeof(*argv));
	worker[argc] = (char *)"--worker";
	return worker;
}

/* Reads a small file as a string without its last newlines; returns its length or -errno. */
static KZ_MAYBE_UNUSED ssize_t kz_read_file(const char *path, char *buf, size_t size)
{
	size_t used = 0;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	while (used + 1 < size) {
		ssize_t got = read(fd, buf + used, size - 1 - used);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0) {
			int err = errno;

			close(fd);
			return -err;
		}
		if (!got)
			break;
		used += (size_t)got;
	}
	close(fd);
	while (used && buf[used - 1] == '\n')
		used--;
	buf[used] = '\0';
	return (ssize_t)used;
}

/* Writes text to an existing (sysfs, procfs) file; 0 or -errno. */
static KZ_MAYBE_UNUSED int kz_write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC), err = 0;
	size_t len = strlen(text);

	if (fd < 0)
		return -errno;
	if (write(fd, text, len) != (ssize_t)len)
		err = errno ? -errno : -EIO;
	close(fd);
	return err;
}

/* A descriptor that is closed where its variable ends. */
#define KZ_FD __attribute__((cleanup(kz_close))) int

static KZ_MAYBE_UNUSED void kz_close(const int *fd)
{
	if (*fd >= 0)
		close(*fd);
}

/* The value of one "Name:  123 kB" line of /proc/meminfo in bytes, or 0. */
static KZ_MAYBE_UNUSED unsigned long kz_meminfo(const char *name)
{
	char line[128];
	unsigned long kb = 0;
	size_t len = strlen(name);
	FILE *f = fopen("/proc/meminfo", "re");

	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f)) {
		if (!strncmp(line, name, len) && line[len] == ':') {
			kb = strtoul(line + len + 1, NULL, 10);
			break;
		}
	}
	fclose(f);
	return kb * 1024;
}

/* /proc/vmstat as text; the caller looks counters up in it. */
struct kz_vmstat {
	char text[16384];
};

static KZ_MAYBE_UNUSED void kz_vmstat_read(struct kz_vmstat *v)
{
	if (kz_read_file("/proc/vmstat", v->text, sizeof(v->text)) < 0)
		v->text[0] = '\0';
}

/* False if this kernel has no such counter. */
static KZ_MAYBE_UNUSED bool kz_vmstat_get(const struct kz_vmstat *v, const char *name,
					  uint64_t *value)
{
	size_t len = strlen(name);
	const char *p = v->text;

	while (*p) {
		if (!strncmp(p, name, len) && p[len] == ' ') {
			*value = strtoull(p + len + 1, NULL, 10);
			return true;
		}
		p = strchr(p, '\n');
		if (!p)
			break;
		p++;
	}
	return false;
}

/* The counters in the results; the pgzeroed_ ones exist on kernels with known-zero tracking only. */
static const char *const kz_counters[] = {
	"pgfault", "thp_fault_alloc", "thp_fault_fallback",
	"pgzeroed_set_reported", "pgzeroed_set_freed", "pgzeroed_set_prezeroed",
	"pgzeroed_skip", "pgzeroed_lost", "pgzeroed_cleared", "pgzeroed_bad",
};

/* Prints "vmstat": {...} with the change of each counter, or null. */
static KZ_MAYBE_UNUSED void kz_vmstat_print_delta(const struct kz_vmstat *before,
						  const struct kz_vmstat *after)
{
	size_t i;

	printf("\"vmstat\": {");
	for (i = 0; i < sizeof(kz_counters) / sizeof(kz_counters[0]); i++) {
		uint64_t a, b;

		printf("%s\"%s\": ", i ? ", " : "", kz_counters[i]);
		if (kz_vmstat_get(before, kz_counters[i], &a) &&
		    kz_vmstat_get(after, kz_counters[i], &b))
			printf("%" PRIu64, b - a);
		else
			printf("null");
	}
	printf("}");
}

static KZ_MAYBE_UNUSED void kz_json_text(const char *text)
{
	putchar('"');
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			putchar('\\');
		if ((unsigned char)*text >= 0x20)
			putchar(*text);
	}
	putchar('"');
}

/* Offset of the first byte that is not zero, or len. Whole words first: this runs over gigabytes. */
static KZ_MAYBE_UNUSED size_t kz_first_nonzero(const void *mem, size_t len)
{
	const unsigned char *p = mem;
	size_t i = 0;

	while (i < len && ((uintptr_t)(p + i) & 7)) {
		if (p[i])
			return i;
		i++;
	}
	for (; i + 64 <= len; i += 64) {
		const uint64_t *w = (const uint64_t *)(const void *)(p + i);

		if (w[0] | w[1] | w[2] | w[3] | w[4] | w[5] | w[6] | w[7])
			break;
	}
	for (; i < len; i++)
		if (p[i])
			return i;
	return len;
}

#endif
