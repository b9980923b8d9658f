// SPDX-License-Identifier: GPL-2.0
/*
 * stall: a program that is always busy, and prints its stalls: the longest gap, the 99th percentile, and
 * the sum of all gaps of a given length. With --report it measures while free memory is reported.
 */
#include "common.h"

#define FLUSH "/sys/kernel/mm/page_reporting/flush"
#define PAGE 4096UL

static const char usage[] =
"usage: stall [options]\n"
"Repeats one small step and measures the time of each; prints one JSON line.\n"
"  --mode MODE      spin:  read CLOCK_MONOTONIC_RAW (default)\n"
"                   alloc: map anonymous memory, write a byte to each page, unmap it\n"
"  --size KB        mapping of alloc, a multiple of 4 (default 4)\n"
"  --ms N           duration (default 1000)\n"
"  --report         measure while another process reports all free memory (it writes to\n"
"                   /sys/kernel/mm/page_reporting/flush)\n"
"  --lost US        gaps of this length count as lost (default 1000)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

/*
 * The number of gaps of each length. Lengths in one slot differ by less than a sixteenth, from a
 * nanosecond to hours.
 */
#define SUB 16U
#define SLOTS (64U * SUB)

struct gaps {
	uint64_t count[SLOTS];
	uint64_t all, longest, lost;
};

static unsigned int slot_of(uint64_t ns)
{
	unsigned int top;

	if (ns < SUB)
		return (unsigned int)ns;
	top = 63U - (unsigned int)__builtin_clzll(ns);
	return (top - 3) * SUB + (unsigned int)(ns >> (top - 4)) % SUB;
}

/* The longest gap that a slot can hold. */
static uint64_t end_of(unsigned int slot)
{
	unsigned int top = slot / SUB + 3;

	if (slot < SUB)
		return slot;
	return ((uint64_t)(SUB + slot % SUB + 1) << (top - 4)) - 1;
}

static void take(struct gaps *gaps, uint64_t ns, uint64_t noticed)
{
	gaps->count[slot_of(ns)]++;
	gaps->all++;
	if (ns > gaps->longest)
		gaps->longest = ns;
	if (ns >= noticed)
		gaps->lost += ns;
}

/* @percent of the gaps are no longer than this. */
static uint64_t percentile(const struct gaps *gaps, unsigned int percent)
{
	uint64_t wanted = (gaps->all * percent + 99) / 100, seen = 0;
	unsigned int slot;

	for (slot = 0; slot < SLOTS; slot++) {
		seen += gaps->count[slot];
		if (seen >= wanted)
			break;
	}
	return end_of(slot) < gaps->longest ? end_of(slot) : gaps->longest;
}

static uint64_t raw_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC_RAW, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}

/* Shared by both processes. */
struct shared {
	volatile int begin, done, error;
	volatile uint64_t began, ended;
};

static void report(struct shared *shared)
{
	int fd = open(FLUSH, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		shared->error = errno;
	while (!shared->begin)
		usleep(1000);
	shared->began = raw_now_ns();
	if (fd >= 0 && write(fd, "0", 1) < 0)
		shared->error = errno;
	shared->ended = raw_now_ns();
	shared->done = 1;
	_exit(0);
}

static void touch(size_t size)
{
	char *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t at;

	if (mem == MAP_FAILED)
		kz_fail("cannot map %zu bytes", size);
	for (at = 0; at < size; at += PAGE)
		*(volatile char *)(mem + at) = 1;
	munmap(mem, size);
}

int main(int argc, char **argv)
{
	static struct kz_vmstat before, after;
	static struct gaps gaps;
	unsigned long ms = 1000, size = 4, lost = 1000;
	static const char *const modes[] = { "spin", "alloc", NULL };
	unsigned int alloc = 0;
	bool reporting = false;
	struct shared *shared;
	uint64_t start, last, now;
	pid_t child = 0;
	const struct kz_option options[] = {
		{ "mode", .choice = &alloc, .choices = modes },
		{ "size", .number = &size, .min = 4, .max = 1UL << 20 },
		{ "ms", .number = &ms, .min = 1, .max = 1000000 },
		{ "report", .flag = &reporting },
		{ "lost", .number = &lost, .min = 1, .max = 1000000 },
		{ 0 },
	};

	kz_only_options(argc, argv, "stall", usage, options);
	if (size % 4)
		kz_die(KZ_USAGE, "--size: %lu is no multiple of 4; see stall --help", size);

	shared = kz_map(PAGE, MAP_SHARED | MAP_ANONYMOUS);
	/* First faults happen before the measurement. */
	memset(&gaps, 1, sizeof(gaps));
	memset(&gaps, 0, sizeof(gaps));
	if (alloc)
		touch(size * 1024);
	if (reporting) {
		child = kz_fork();
		if (!child)
			report(shared);
	}
	kz_vmstat_read(&before);
	shared->begin = 1;
	start = last = raw_now_ns();
	do {
		if (alloc)
			touch(size * 1024);
		now = raw_now_ns();
		/* Only the time of the report counts. */
		if (!reporting || shared->began)
			take(&gaps, now - last, lost * 1000);
		else
			start = now;
		last = now;
	} while (reporting ? !shared->done : now - start < ms * 1000000ULL);
	kz_vmstat_read(&after);
	if (child)
		waitpid(child, NULL, 0);
	if (shared->error)
		kz_die(KZ_BROKEN, "cannot report (" FLUSH "): %s; %s", strerror(shared->error),
		       kz_help(shared->error));
	printf("{\"mode\": \"%s\", \"reporting\": %s, \"wall_ns\": %" PRIu64 ", \"gaps\": %" PRIu64
	       ", \"median_ns\": %" PRIu64 ", \"p99_ns\": %" PRIu64 ", \"longest_ns\": %" PRIu64
	       ", \"lost_ns\": %" PRIu64 ", \"report_ns\": %" PRIu64 ", ",
	       alloc ? "alloc" : "spin", reporting ? "true" : "false", now - start, gaps.all,
	       percentile(&gaps, 50), percentile(&gaps, 99), gaps.longest, gaps.lost,
	       reporting ? shared->ended - shared->began : 0);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	return KZ_OK;
}
