/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the guest programs share: messages, strict parsing, time, /proc/vmstat.
 * Everything is static inline, so that each program stays one static binary.
 */
#ifndef KZ_GUEST_COMMON_H
#define KZ_GUEST_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
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

static KZ_MAYBE_UNUSED uint64_t kz_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}

/* A whole non-negative number in [min, max], or death with a message that names the option. */
static KZ_MAYBE_UNUSED unsigned long kz_number(const char *option, const char *text,
					       unsigned long min, unsigned long max)
{
	unsigned long value;
	char *end;

	errno = 0;
	value = strtoul(text, &end, 0);
	if (errno || end == text || *end || *text == '-' || value < min || value > max)
		kz_die(KZ_USAGE, "%s: '%s' is not a whole number from %lu to %lu; see --help",
		       option, text, min, max);
	return value;
}

/* Reads a small file into buf as a string without its last newline; -errno if it cannot. */
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

/*
 * Prints ', "name": delta' (or null) for each counter the results need. The pgzeroed_ counters
 * exist on a kernel with known-zero tracking alone.
 */
static const char *const kz_counters[] = {
	"pgfault", "thp_fault_alloc", "thp_fault_fallback",
	"pgzeroed_set_reported", "pgzeroed_set_freed", "pgzeroed_set_inflated",
	"pgzeroed_set_prezeroed",
	"pgzeroed_skip_reported", "pgzeroed_skip_freed", "pgzeroed_skip_inflated",
	"pgzeroed_skip_prezeroed",
	"pgzeroed_unwanted",
	"pgzeroed_lost", "pgzeroed_cleared", "pgzeroed_bad",
};

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
