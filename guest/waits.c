// SPDX-License-Identifier: GPL-2.0
/*
 * waits: a watcher of high priority that does what tasks of an operator do, each in its turn, while
 * other programs disturb memory management. It prints how long each took at most, and longer than
 * all but one of a thousand.
 */
#include "common.h"

#include <sched.h>
#include <signal.h>
#include <sys/time.h>

#define PRIORITY 10
#define MOST_TIMES (1UL << 20)
#define MOST_BLOCKS 1024
#define MOST_TRIES_S 20
#define BLOCK "/sys/devices/system/memory/memory%d/state"
#define COMPACT "/proc/sys/vm/compact_memory"
#define FLUSH "/sys/kernel/mm/page_reporting/flush"
#define HUGE_SIZE "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
#define CMA "/sys/kernel/debug/cma/reserved/"

static const char usage[] =
"usage: waits [options]\n"
"Does these things by turns, with SCHED_FIFO, and measures each:\n"
"  map      maps and unmaps 2 MiB\n"
"  fault    writes to a new page: a page fault, an allocation of order 0\n"
"  huge     writes to a new huge page: an allocation of order 9 (needs THP)\n"
"  compact  compacts all memory\n"
"  cma      allocates 16 pages from a CMA area (needs CONFIG_CMA_DEBUGFS)\n"
"  offline  takes a memory block offline; back online does not count\n"
"  flush    reports all free memory (needs free page reporting)\n"
"Prints one JSON line: of each, how often, 99.9th percentile and longest, in microseconds.\n"
"  --seconds S  duration (default 30)\n"
"  --help       this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

/* Each returns the time that it took in nanoseconds, or 0 if it could not be done. */
static uint64_t time_map(void)
{
	const uint64_t began = kz_now_ns();

	munmap(kz_map(KZ_HUGE, 0), KZ_HUGE);
	return kz_now_ns() - began;
}

static uint64_t time_touch(int advice)
{
	char *mem = kz_map(2 * KZ_HUGE, 0);
	volatile char *page = (char *)(((uintptr_t)mem + KZ_HUGE - 1) & ~(KZ_HUGE - 1));
	uint64_t began, took;

	madvise(mem, 2 * KZ_HUGE, advice);
	began = kz_now_ns();
	*page = 1;
	took = kz_now_ns() - began;
	munmap(mem, 2 * KZ_HUGE);
	return took;
}

static uint64_t time_fault(void)
{
	return time_touch(MADV_NOHUGEPAGE);
}

static uint64_t time_huge(void)
{
	return access(HUGE_SIZE, F_OK) ? 0 : time_touch(MADV_HUGEPAGE);
}

static uint64_t time_write(const char *path, const char *text)
{
	const uint64_t began = kz_now_ns();

	return kz_write_file(path, text) ? 0 : kz_now_ns() - began;
}

static uint64_t time_compact(void)
{
	return time_write(COMPACT, "1");
}

static uint64_t time_cma(void)
{
	const uint64_t took = time_write(CMA "alloc", "16");

	if (took)
		kz_write_file(CMA "free", "16");
	return took;
}

static void on_alarm(int signal)
{
	(void)signal;
}

/* The kernel retries while a page cannot move, which is not what is measured: give up in the end. */
static uint64_t time_going_offline(const char *block)
{
	const struct sigaction action = { .sa_handler = on_alarm };
	const struct itimerval on = { { 1, 0 }, { MOST_TRIES_S, 0 } };
	const struct itimerval off = { { 0, 0 }, { 0, 0 } };
	uint64_t took;

	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &on, NULL);
	took = time_write(block, "offline");
	setitimer(ITIMER_REAL, &off, NULL);
	if (took)
		kz_write_file(block, "online_movable");
	return took;
}

/* The last block that can be taken offline. ZONE_MOVABLE has no other memory. */
static uint64_t time_offline(void)
{
	static char block[64];
	uint64_t took;

	if (*block)
		return time_going_offline(block);
	for (int number = MOST_BLOCKS; number > 0; number--) {
		snprintf(block, sizeof(block), BLOCK, number);
		if (!access(block, W_OK) && (took = time_going_offline(block)))
			return took;
	}
	*block = '\0';
	return 0;
}

static uint64_t time_flush(void)
{
	return time_write(FLUSH, "0");
}

static const struct task {
	const char *name;
	uint64_t (*time)(void);
} tasks[] = {
	{ "map", time_map },
	{ "fault", time_fault },
	{ "huge", time_huge },
	{ "compact", time_compact },
	{ "cma", time_cma },
	{ "offline", time_offline },
	{ "flush", time_flush },
};
#define NR_TASKS (sizeof(tasks) / sizeof(tasks[0]))

struct times {
	uint64_t *ns;
	size_t n;
};

static int by_size(const void *a, const void *b)
{
	const uint64_t one = *(const uint64_t *)a, two = *(const uint64_t *)b;

	return (one > two) - (one < two);
}

static void print(const char *name, struct times *times, bool first)
{
	uint64_t p999_us, worst_us;

	qsort(times->ns, times->n, sizeof(*times->ns), by_size);
	p999_us = times->ns[(times->n - 1) * 999 / 1000] / 1000;
	worst_us = times->ns[times->n - 1] / 1000;
	printf("%s\"%s\": {\"times\": %zu, \"p999_us\": %" PRIu64 ", \"worst_us\": %" PRIu64 "}",
	       first ? "" : ", ", name, times->n, p999_us, worst_us);
}

int main(int argc, char **argv)
{
	const struct sched_param priority = { .sched_priority = PRIORITY };
	struct times times[NR_TASKS];
	unsigned long seconds = 30;
	bool first = true;
	uint64_t deadline;
	size_t i;
	const struct kz_option options[] = {
		{ "seconds", .number = &seconds, .min = 1, .max = 1000000 },
		{ 0 },
	};

	kz_only_options(argc, argv, "waits", usage, options);
	for (i = 0; i < NR_TASKS; i++)
		times[i] = (struct times){ kz_map(MOST_TIMES * sizeof(uint64_t), 0), 0 };
	kz_write_file("/proc/self/oom_score_adj", "-1000");
	if (sched_setscheduler(0, SCHED_FIFO, &priority))
		kz_die(KZ_BROKEN, "cannot get SCHED_FIFO: %s; run it as root", strerror(errno));
	deadline = kz_now_ns() + seconds * 1000000000ULL;
	while (kz_now_ns() < deadline) {
		for (i = 0; i < NR_TASKS; i++) {
			const uint64_t took = tasks[i].time();

			if (took && times[i].n < MOST_TIMES)
				times[i].ns[times[i].n++] = took;
			/* It leaves the CPU to those that it watches. */
			usleep(1000);
		}
	}
	printf("{\"waits\": {");
	for (i = 0; i < NR_TASKS; i++) {
		if (!times[i].n)
			continue;
		print(tasks[i].name, &times[i], first);
		first = false;
	}
	printf("}}\n");
	return KZ_OK;
}
