// SPDX-License-Identifier: GPL-2.0
/*
 * stall: a program that is always busy, and tells how long it was kept from going on: in the longest gap,
 * in all but a hundredth of them, and in all gaps together that are long enough to be noticed. Can have
 * free memory reported meanwhile, and measures for exactly that long.
 */
#include "common.h"

#include <getopt.h>
#include <sys/wait.h>

#define FLUSH "/sys/module/page_reporting/parameters/flush"
#define PAGE 4096UL

static void usage(FILE *out)
{
	fprintf(out,
"usage: stall [options]\n"
"Does one small thing over and over and measures how long each takes; prints one JSON line.\n"
"  --mode MODE      spin:  read CLOCK_MONOTONIC_RAW (default)\n"
"                   alloc: map anonymous memory, write a byte to each page, unmap it\n"
"  --size KB        how much alloc maps, a multiple of 4 (default 4)\n"
"  --ms N           how long (default 1000)\n"
"  --report         as long as it takes to report all free memory instead, which is done meanwhile\n"
"                   by a process of its own (flush parameter of page_reporting)\n"
"  --lost US        gaps of this length count as lost (default 1000)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n");
}

/*
 * How many gaps there were of each length. Lengths in one slot differ by less than a sixteenth, from a
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

/* So many of a hundred gaps are no longer than this. */
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

/* What both processes see. */
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
		kz_die(KZ_BROKEN, "cannot map %zu bytes: %s", size, strerror(errno));
	for (at = 0; at < size; at += PAGE)
		*(volatile char *)(mem + at) = 1;
	munmap(mem, size);
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "mode", required_argument, NULL, 'm' },
		{ "size", required_argument, NULL, 's' },
		{ "ms", required_argument, NULL, 't' },
		{ "report", no_argument, NULL, 'r' },
		{ "lost", required_argument, NULL, 'l' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	static struct kz_vmstat before, after;
	static struct gaps gaps;
	unsigned long ms = 1000, size = 4, lost = 1000;
	bool alloc = false, reporting = false;
	struct shared *shared;
	uint64_t start, last, now;
	pid_t child = 0;
	int opt;

	kz_program = "stall";
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 'm':
			if (strcmp(optarg, "spin") && strcmp(optarg, "alloc"))
				kz_die(KZ_USAGE, "--mode: '%s' is neither spin nor alloc; see --help", optarg);
			alloc = !strcmp(optarg, "alloc");
			break;
		case 's':
			size = kz_number("--size", optarg, 4, 1UL << 20);
			break;
		case 't':
			ms = kz_number("--ms", optarg, 1, 1000000);
			break;
		case 'r':
			reporting = true;
			break;
		case 'l':
			lost = kz_number("--lost", optarg, 1, 1000000);
			break;
		case 'h':
			usage(stdout);
			return KZ_OK;
		default:
			usage(stderr);
			return KZ_USAGE;
		}
	}
	if (optind < argc)
		kz_die(KZ_USAGE, "unexpected argument '%s'; see --help", argv[optind]);
	if (size % 4)
		kz_die(KZ_USAGE, "--size: %lu is no multiple of 4; see --help", size);

	shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		kz_die(KZ_BROKEN, "mmap: %s", strerror(errno));
	/* Whatever is done for the first time is done before. */
	memset(&gaps, 1, sizeof(gaps));
	memset(&gaps, 0, sizeof(gaps));
	if (alloc)
		touch(size * 1024);
	if (reporting) {
		child = fork();
		if (child < 0)
			kz_die(KZ_BROKEN, "fork: %s", strerror(errno));
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
		/* Before the other process has begun there is nothing to be kept by. */
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
		kz_die(KZ_BROKEN, "cannot report (" FLUSH "): %s", strerror(shared->error));
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
