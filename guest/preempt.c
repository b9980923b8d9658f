// SPDX-License-Identifier: GPL-2.0
/*
 * preempt: measures how long a task waits while kzeropaged, which has the lowest priority, is
 * preempted. kzeropaged shares CPU 0 with a busy process, and is preempted wherever its short time
 * slices end. On CPU 1, one process starts pass after pass, and another allocates contiguous
 * memory, compacts memory, or takes memory offline.
 */
#include "common.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define ENABLED "/sys/kernel/mm/zero_page/enabled"
#define THREAD "kzeropaged0"
#define CHURN (4 * KZ_MB)
#define MOST_TIMES 1000000
#define COMPACT "/proc/sys/vm/compact_memory"
#define BLOCK "/sys/devices/system/memory/memory%d/state"
#define MOST_BLOCKS 1024

static const char usage[] =
"usage: preempt [options]\n"
"Lets kzeropaged make pass after pass on CPU 0, beside a process that keeps this CPU busy. Meanwhile, does one\n"
"thing again and again on CPU 1. Prints the median and the longest time of it in microseconds as a JSON line.\n"
"Without kzeropaged it does the same.\n"
"  --seconds N      how long (default 15)\n"
"  --what NAME      cma: allocate from a CMA area; compact: compact all memory; offline: take a memory block\n"
"                   offline, and online again, which does not count (default cma)\n"
"  --cma DIR        the CMA area in debugfs (default /sys/kernel/debug/cma/reserved)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

enum { CMA, COMPACTION, OFFLINE };

static const char *const names[] = { "cma", "compact", "offline", NULL };

/* Two writes: the first is timed, the second, if there is one, makes it possible again. */
struct work {
	char path[300];
	const char *text;
	char undo_path[300];
	const char *undo_text;
};

static void pin(pid_t pid, int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(pid, sizeof(set), &set))
		kz_die(KZ_BROKEN, "cannot move process %ld to CPU %d: %s", (long)pid, cpu, strerror(errno));
}

/* The process ID of the thread of node 0, or 0 if there is none. */
static pid_t find_thread(void)
{
	struct dirent *entry;
	char path[300], name[32];
	DIR *proc = opendir("/proc");
	pid_t found = 0;

	if (!proc)
		kz_die(KZ_BROKEN, "cannot read /proc: %s", strerror(errno));
	while (!found && (entry = readdir(proc))) {
		snprintf(path, sizeof(path), "/proc/%s/comm", entry->d_name);
		if (atoi(entry->d_name) && kz_read_file(path, name, sizeof(name)) > 0 && !strcmp(name, THREAD))
			found = atoi(entry->d_name);
	}
	closedir(proc);
	return found;
}

/* A process of its own that ends with this one. */
static bool child(int cpu)
{
	if (kz_fork())
		return false;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	pin(0, cpu);
	return true;
}

static void keep_busy(void)
{
	for (;;)
		;
}

/* Fill the lists of this CPU with dirty pages. */
static void churn(void)
{
	char *mem = kz_map(CHURN, 0);

	memset(mem, 0x5a, CHURN);
	munmap(mem, CHURN);
}

/* A pass of kzeropaged starts when so much is freed, and begins with the drain. */
static void start_passes(void)
{
	for (;;)
		churn();
}

static int by_size(const void *a, const void *b)
{
	return *(const uint64_t *)a < *(const uint64_t *)b ? -1 : 1;
}

static void write_or_die(const char *path, const char *text)
{
	int error = kz_write_file(path, text);

	if (error)
		kz_die(KZ_BROKEN, "cannot write %s to %s: %s", text, path, strerror(-error));
}

static void find_cma(struct work *work, const char *cma)
{
	snprintf(work->path, sizeof(work->path), "%s/alloc", cma);
	snprintf(work->undo_path, sizeof(work->undo_path), "%s/free", cma);
	work->text = work->undo_text = "16";
	if (access(work->path, W_OK))
		kz_die(KZ_BROKEN, "%s: %s; mount debugfs, and use a kernel with CONFIG_CMA_DEBUGFS", work->path,
		       strerror(errno));
}

/* The last memory block that can be taken offline. */
static void find_block(struct work *work)
{
	for (int block = MOST_BLOCKS; block >= 0; block--) {
		snprintf(work->path, sizeof(work->path), BLOCK, block);
		if (kz_write_file(work->path, "offline"))
			continue;
		write_or_die(work->path, "online_movable");
		strcpy(work->undo_path, work->path);
		work->text = "offline";
		work->undo_text = "online_movable";
		return;
	}
	kz_die(KZ_BROKEN, "no memory block can be taken offline; give the guest more memory");
}

int main(int argc, char **argv)
{
	const char *cma = "/sys/kernel/debug/cma/reserved";
	struct work work = { .path = COMPACT, .text = "1" };
	unsigned long seconds = 15, n = 0;
	unsigned int what = CMA;
	uint64_t *took_us, began, end;
	char enabled[8] = "";
	pid_t thread;

	kz_only_options(argc, argv, "preempt", usage, (struct kz_option[]){
		{ "seconds", .number = &seconds, .min = 1, .max = 100000 },
		{ "what", .choice = &what, .choices = names },
		{ "cma", .text = &cma },
		{ 0 } });
	if (what == CMA)
		find_cma(&work, cma);
	else if (what == OFFLINE)
		find_block(&work);
	took_us = calloc(MOST_TIMES, sizeof(*took_us));
	if (!took_us)
		kz_die(KZ_BROKEN, "out of memory");
	kz_read_file(ENABLED, enabled, sizeof(enabled));
	thread = find_thread();
	if (thread)
		pin(thread, 0);
	if (child(0))
		keep_busy();
	if (child(1))
		start_passes();
	pin(0, 1);

	end = kz_now_ns() + seconds * 1000000000ULL;
	while (n < MOST_TIMES && kz_now_ns() < end) {
		churn();
		began = kz_now_ns();
		write_or_die(work.path, work.text);
		took_us[n++] = (kz_now_ns() - began) / 1000;
		if (work.undo_text)
			write_or_die(work.undo_path, work.undo_text);
	}
	qsort(took_us, n, sizeof(*took_us), by_size);
	printf("{\"enabled\": \"%.1s\", \"what\": \"%s\", \"times\": %lu, \"median_us\": %llu, \"worst_us\": %llu}\n",
	       enabled, names[what], n, (unsigned long long)took_us[n / 2], (unsigned long long)took_us[n - 1]);
	return KZ_OK;
}
