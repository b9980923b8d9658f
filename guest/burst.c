// SPDX-License-Identifier: GPL-2.0
/*
 * burst: allocates memory at given times, holds it and frees it. Prints how long each allocation
 * took, with its first touch.
 */
#include "common.h"

#define PAGE 4096UL
#define MAX_BURSTS 256

static const char usage[] =
"usage: burst START:SIZE:HOLD ...\n"
"Maps SIZE MB at START ms, writes a byte to each 4 KiB page, and unmaps it HOLD ms later; prints one\n"
"JSON line. A burst that is due while the last one lasts begins right after it.\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

struct burst {
	unsigned long start_ms, megabytes, hold_ms;
	uint64_t ns;
};

static void parse(const char *text, struct burst *burst)
{
	int end = 0;

	if (sscanf(text, "%7lu:%7lu:%7lu%n", &burst->start_ms, &burst->megabytes, &burst->hold_ms,
		   &end) != 3 || text[end] || !burst->megabytes)
		kz_die(KZ_USAGE, "'%s': not START:SIZE:HOLD in ms, MB and ms; see burst --help", text);
}

static void sleep_until(uint64_t ns)
{
	const struct timespec when = { (time_t)(ns / 1000000000ULL), (long)(ns % 1000000000ULL) };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR)
		;
}

static void run(struct burst *burst, uint64_t began)
{
	size_t bytes = burst->megabytes * KZ_MB, at;
	volatile unsigned char *mem;
	uint64_t start;

	sleep_until(began + burst->start_ms * 1000000ULL);
	start = kz_now_ns();
	mem = kz_map(bytes, 0);
	madvise((void *)mem, bytes, MADV_HUGEPAGE);
	for (at = 0; at < bytes; at += PAGE)
		mem[at] = 1;
	burst->ns = kz_now_ns() - start;
	sleep_until(start + burst->ns + burst->hold_ms * 1000000ULL);
	munmap((void *)mem, bytes);
}

int main(int argc, char **argv)
{
	static struct kz_vmstat before, after;
	static struct burst bursts[MAX_BURSTS];
	const struct kz_option options[] = { { 0 } };
	struct rusage first, last;
	struct timespec cpu;
	uint64_t began, cpu_ns, bytes = 0;
	int i, n;

	i = kz_options(argc, argv, "burst", usage, options);
	n = argc - i;
	if (n < 1 || n > MAX_BURSTS)
		kz_die(KZ_USAGE, "%d bursts: 1 to %d are possible; see burst --help", n, MAX_BURSTS);
	for (i = 0; i < n; i++)
		parse(argv[argc - n + i], &bursts[i]);
	kz_vmstat_read(&before);
	getrusage(RUSAGE_SELF, &first);
	began = kz_now_ns();
	for (i = 0; i < n; i++) {
		run(&bursts[i], began);
		bytes += bursts[i].megabytes * KZ_MB;
	}
	getrusage(RUSAGE_SELF, &last);
	kz_vmstat_read(&after);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
	cpu_ns = (uint64_t)cpu.tv_sec * 1000000000ULL + (uint64_t)cpu.tv_nsec;
	printf("{\"bytes\": %" PRIu64 ", \"minor_faults\": %ld, \"task_clock_ns\": %" PRIu64
	       ", \"burst_ns\": [",
	       bytes, last.ru_minflt - first.ru_minflt, cpu_ns);
	for (i = 0; i < n; i++)
		printf("%s%" PRIu64, i ? ", " : "", bursts[i].ns);
	printf("], ");
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	return KZ_OK;
}
