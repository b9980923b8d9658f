// SPDX-License-Identifier: GPL-2.0
/*
 * preempt: measures how long contiguous allocations wait while kzeropaged, which has the lowest priority, does not
 * get its CPU. Each try starts a pass of kzeropaged, takes the CPU away from it at a random moment, and allocates
 * from a CMA area meanwhile.
 */
#include "common.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define KNOB "/sys/kernel/mm/zero_page/mini_order"
#define ENABLED "/sys/kernel/mm/zero_page/enabled"
#define THREAD "kzeropaged0"
#define CHURN (32 * KZ_MB)
#define SAFETY_NS (20ULL * 1000 * 1000 * 1000)

/* Shared with the process that keeps CPU 0 busy. */
struct hog {
	volatile uint64_t until_ns;	/* 0: leave the CPU alone */
};

static const char usage[] =
"usage: preempt [options]\n"
"Runs kzeropaged on CPU 0 and takes this CPU away from it at random moments. Meanwhile, allocates from a CMA\n"
"area on CPU 1. Prints the longest and the median time of an allocation in microseconds as a JSON line.\n"
"  --tries N        how often (default 200)\n"
"  --latest US      the latest moment to take the CPU away, after a pass has begun (default 3000)\n"
"  --cma DIR        the CMA area in debugfs (default /sys/kernel/debug/cma/reserved)\n"
"  --seed N         of the random moments (default 1)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

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

static void keep_busy(struct hog *hog)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	pin(0, 0);
	for (;;) {
		if (kz_now_ns() >= hog->until_ns)
			usleep(50);
	}
}

/* Fill the lists of this CPU with dirty pages. */
static void churn(void)
{
	char *mem = kz_map(CHURN, 0);

	memset(mem, 0x5a, CHURN);
	munmap(mem, CHURN);
}

static void wait_us(uint64_t us)
{
	uint64_t end = kz_now_ns() + us * 1000;

	while (kz_now_ns() < end)
		;
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

int main(int argc, char **argv)
{
	unsigned long tries = 200, latest_us = 3000, seed = 1, i;
	const char *cma = "/sys/kernel/debug/cma/reserved";
	char allocate[300], release[300], enabled[8] = "";
	uint64_t *took_us, began;
	struct hog *hog;
	pid_t thread;

	kz_only_options(argc, argv, "preempt", usage, (struct kz_option[]){
		{ "tries", .number = &tries, .min = 1, .max = 100000 },
		{ "latest", .number = &latest_us, .min = 1, .max = 1000000 },
		{ "cma", .text = &cma },
		{ "seed", .number = &seed, .min = 0, .max = ~0UL },
		{ 0 } });
	kz_rng_state = seed;
	snprintf(allocate, sizeof(allocate), "%s/alloc", cma);
	snprintf(release, sizeof(release), "%s/free", cma);
	if (access(allocate, W_OK))
		kz_die(KZ_BROKEN, "%s: %s; mount debugfs, and use a kernel with CONFIG_CMA_DEBUGFS", allocate,
		       strerror(errno));
	kz_read_file(ENABLED, enabled, sizeof(enabled));
	thread = find_thread();
	if (thread)
		pin(thread, 0);

	hog = mmap(NULL, sizeof(*hog), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	took_us = calloc(tries, sizeof(*took_us));
	if (hog == MAP_FAILED || !took_us)
		kz_die(KZ_BROKEN, "out of memory");
	if (!kz_fork())
		keep_busy(hog);
	pin(0, 1);

	for (i = 0; i < tries; i++) {
		churn();
		/* Any write to a knob starts a pass. Nothing is to be zeroed, so most of it is the drain. */
		if (thread)
			write_or_die(KNOB, "10");
		wait_us(kz_between(0, latest_us));
		hog->until_ns = kz_now_ns() + SAFETY_NS;
		wait_us(500);
		began = kz_now_ns();
		write_or_die(allocate, "16");
		took_us[i] = (kz_now_ns() - began) / 1000;
		hog->until_ns = 0;
		write_or_die(release, "16");
		usleep(2000);
	}
	qsort(took_us, tries, sizeof(*took_us), by_size);
	printf("{\"enabled\": \"%.1s\", \"tries\": %lu, \"median_us\": %llu, \"worst_us\": %llu}\n", enabled, tries,
	       (unsigned long long)took_us[tries / 2], (unsigned long long)took_us[tries - 1]);
	return KZ_OK;
}
