// SPDX-License-Identifier: GPL-2.0
/*
 * stress: disturbs memory management while another program checks it. Each driver is a process
 * that repeats one disturbance. A driver that did nothing fails the run.
 */
#include "common.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/time.h>

#define ZERO_PAGE "/sys/kernel/mm/zero_page/"

static const char usage[] =
"usage: stress [options] DRIVER...\n"
"Runs the drivers side by side; prints one JSON line with the steps of each.\n"
"Drivers:\n"
"  compact      compacts all memory through /proc/sys/vm/compact_memory\n"
"  hotplug      takes every CPU but the first offline and online again\n"
"  pressure     takes memory until little is left, gives it back, drops caches\n"
"  hugetlb      grows and shrinks the pool of huge pages\n"
"  flush        reports all free memory to the host\n"
"  memoryblock  takes blocks of memory offline and online again\n"
"  softoffline  takes single pages out of use and back again (needs debugfs, HWPOISON_INJECT)\n"
"  prezero      turns kzeropaged on and off, and sets max_rate\n"
"  reporter     switches the page reporter for tests on and off\n"
"Options:\n"
"  --seconds S  duration (default 10), up to 120 s more until each driver has done a step\n"
"  --seed N     the random choices (default 1)\n"
"  --help       this text\n"
"Exit: 0 done, 1 a driver did nothing, 2 bad usage, 3 the machine cannot do it.\n";

/* A machine that is busy may not get to a driver's first step in time: it may begin this late. */
#define LATE_NS (120 * 1000000000ULL)

static void nap(unsigned long max_ms)
{
	usleep((useconds_t)(kz_between(0, max_ms) * 1000));
}

/* Each step returns 1 if it changed something, 0 if not. */
static int step_compact(void)
{
	int done = !kz_write_file("/proc/sys/vm/compact_memory", "1");

	nap(20);
	return done;
}

static int step_hotplug(void)
{
	char path[80];
	long cpus = sysconf(_SC_NPROCESSORS_CONF);
	int done;

	if (cpus < 2)
		return 0;
	snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%lu/online",
		 kz_between(1, (unsigned long)cpus - 1));
	done = !kz_write_file(path, "0");
	nap(20);
	done &= !kz_write_file(path, "1");
	nap(20);
	return done;
}

static int step_pressure(void)
{
	/* More memory than the machine has, or as much as addresses of 32 bits allow. */
	const size_t chunk = 2 * KZ_MB, size = sizeof(size_t) > 4 ? 1ULL << 36 : 5ULL << 29;
	size_t used = 0;
	char *mem = mmap(NULL, size, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (mem == MAP_FAILED)
		return 0;
	madvise(mem, size, kz_between(0, 1) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	while (used < size && kz_meminfo("MemAvailable") > kz_between(24, 64) * KZ_MB) {
		memset(mem + used, 0xa5, chunk);
		used += chunk;
	}
	nap(50);
	munmap(mem, size);
	kz_write_file("/proc/sys/vm/drop_caches", kz_between(0, 1) ? "1" : "3");
	nap(50);
	return used > 0;
}

static int step_hugetlb(void)
{
	char text[24];
	int done;

	snprintf(text, sizeof(text), "%lu", kz_between(0, 32));
	done = !kz_write_file("/proc/sys/vm/nr_hugepages", text);
	nap(30);
	return done;
}

static int step_flush(void)
{
	int done = !kz_write_file("/sys/kernel/mm/page_reporting/flush", "0");

	nap(30);
	return done;
}

/* The kernel retries to offline a block while a page in it cannot move; only a signal ends that. */
#define OFFLINE_MS 500

static void on_alarm(int signal)
{
	(void)signal;
}

static int write_or_give_up(const char *path, const char *text)
{
	const struct sigaction action = { .sa_handler = on_alarm };
	/* Again and again: the first may come before the write has begun. */
	const struct itimerval on = { { 0, OFFLINE_MS * 1000 }, { 0, OFFLINE_MS * 1000 } };
	const struct itimerval off = { { 0, 0 }, { 0, 0 } };
	int err;

	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &on, NULL);
	err = kz_write_file(path, text);
	setitimer(ITIMER_REAL, &off, NULL);
	return err;
}

static int step_memoryblock(void)
{
	char path[80], text[32];
	unsigned long block = kz_between(2, 15);

	snprintf(path, sizeof(path), "/sys/devices/system/memory/memory%lu/removable", block);
	if (kz_read_file(path, text, sizeof(text)) < 0)
		return 0;
	snprintf(path, sizeof(path), "/sys/devices/system/memory/memory%lu/state", block);
	/* A block that cannot go offline is no error. */
	if (write_or_give_up(path, "offline"))
		return 0;
	nap(10);
	return !kz_write_file(path, "online");
}

static int step_softoffline(void)
{
	const unsigned long pages = (unsigned long)sysconf(_SC_PHYS_PAGES);
	const unsigned long pfn = kz_between(KZ_MB * 16 >> 12, pages);
	char text[24];
	int tries;

	snprintf(text, sizeof(text), "0x%lx", pfn << 12);
	/* Holes, kernel pages and pages that cannot move are refused, which is no error. */
	if (kz_write_file("/sys/devices/system/memory/soft_offline_page", text)) {
		nap(2);
		return 0;
	}
	nap(5);
	snprintf(text, sizeof(text), "0x%lx", pfn);
	for (tries = 0; tries < 10; tries++) {
		if (!kz_write_file("/sys/kernel/debug/hwpoison/unpoison-pfn", text))
			return 1;
		nap(5);
	}
	return 0;
}

static int step_prezero(void)
{
	static const char *const bad[][2] = {
		{ "enabled", "2" }, { "enabled", "maybe" }, { "max_rate", "1M" }, { "max_rate", "-1" },
	};
	char path[64], text[24] = "";
	const char *knob;
	unsigned long i;
	int err;

	switch (kz_between(0, 4)) {
	case 0:
		i = kz_between(0, sizeof(bad) / sizeof(bad[0]) - 1);
		snprintf(path, sizeof(path), ZERO_PAGE "%s", bad[i][0]);
		err = kz_write_file(path, bad[i][1]);
		if (err != -EINVAL && err != -ENOENT)
			kz_die(KZ_FAILED, "%s: '%s' was not refused (%d); see Documentation/admin-guide/mm", path, bad[i][1], err);
		return 0;
	case 1:
		knob = "max_rate";
		snprintf(text, sizeof(text), "%lu", kz_between(0, 4) ? 0 : KZ_MB << kz_between(4, 10));
		break;
	default:
		/* On most of the time, so that there is something to disturb. */
		knob = "enabled";
		snprintf(text, sizeof(text), "%d", kz_between(0, 3) ? 1 : 0);
		break;
	}
	snprintf(path, sizeof(path), ZERO_PAGE "%s", knob);
	err = kz_write_file(path, text);
	if (err && err != -ENOENT)
		kz_die(KZ_FAILED, "%s: '%s' was refused (%d); see Documentation/admin-guide/mm", path, text, err);
	nap(30);
	return !err;
}

static int step_reporter(void)
{
	int done = !kz_write_file("/sys/module/page_zeroed_reporter/parameters/mode",
				  kz_between(0, 1) ? "honest" : "off");

	nap(300);
	return done;
}

static const struct driver {
	const char *name;
	int (*step)(void);
} drivers[] = {
	{ "compact", step_compact },
	{ "hotplug", step_hotplug },
	{ "pressure", step_pressure },
	{ "hugetlb", step_hugetlb },
	{ "flush", step_flush },
	{ "memoryblock", step_memoryblock },
	{ "softoffline", step_softoffline },
	{ "prezero", step_prezero },
	{ "reporter", step_reporter },
};
#define NR_DRIVERS (sizeof(drivers) / sizeof(drivers[0]))

static void drive(const struct driver *driver, unsigned long *count, unsigned long seed,
		  uint64_t deadline)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	kz_write_file("/proc/self/oom_score_adj", "1000");
	kz_rng_state = kz_mix(seed);
	while (kz_now_ns() < deadline || (!*count && kz_now_ns() < deadline + LATE_NS)) {
		if (driver->step())
			__atomic_add_fetch(count, 1, __ATOMIC_RELAXED);
		else
			usleep(1000);
	}
	_exit(KZ_OK);
}

static pid_t start(const struct driver *driver, unsigned long *count, unsigned long seed,
		   uint64_t deadline)
{
	pid_t pid = kz_fork();

	if (!pid)
		drive(driver, count, seed, deadline);
	return pid;
}

int main(int argc, char **argv)
{
	const struct driver *chosen[NR_DRIVERS];
	unsigned long seconds = 10, seed = 1, killed = 0, *counts;
	pid_t pids[NR_DRIVERS];
	size_t nr = 0, i, running;
	uint64_t deadline;
	bool idle = false;
	const struct kz_option options[] = {
		{ "seconds", .number = &seconds, .min = 1, .max = 1000000 },
		{ "seed", .number = &seed, .max = ULONG_MAX - 1 },
		{ 0 },
	};

	kz_options(argc, argv, "stress", usage, options);
	if (optind == argc)
		kz_die(KZ_USAGE, "no driver: name at least one; see stress --help");
	for (; optind < argc; optind++) {
		for (i = 0; i < NR_DRIVERS; i++)
			if (!strcmp(argv[optind], drivers[i].name))
				break;
		if (i == NR_DRIVERS)
			kz_die(KZ_USAGE, "'%s': unknown driver; see stress --help", argv[optind]);
		if (nr == NR_DRIVERS)
			kz_die(KZ_USAGE, "%s: a driver is named twice; see stress --help", argv[optind]);
		chosen[nr++] = &drivers[i];
	}
	counts = kz_map(sizeof(*counts) * NR_DRIVERS, MAP_SHARED | MAP_ANONYMOUS);
	deadline = kz_now_ns() + seconds * 1000000000ULL;
	for (i = 0; i < nr; i++)
		pids[i] = start(chosen[i], &counts[i], seed + i, deadline);
	for (running = nr; running;) {
		int status;
		pid_t pid = wait(&status);

		if (pid < 0)
			kz_fail("cannot wait for %zu drivers", running);
		for (i = 0; i < nr && pids[i] != pid; i++)
			;
		if (i == nr)
			continue;
		if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && kz_now_ns() < deadline) {
			/* The pressure driver may run the guest out of memory. */
			killed++;
			pids[i] = start(chosen[i], &counts[i], seed + i + killed * NR_DRIVERS,
					deadline);
			continue;
		}
		if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
			kz_die(KZ_FAILED, "%s was killed by signal %d, perhaps by a kernel fault; see the kernel log (dmesg)",
			       chosen[i]->name, WTERMSIG(status));
		if (WIFEXITED(status) && WEXITSTATUS(status))
			return WEXITSTATUS(status);
		running--;
	}
	printf("{\"seconds\": %lu, \"seed\": %lu, \"killed\": %lu, \"steps\": {", seconds, seed,
	       killed);
	for (i = 0; i < nr; i++) {
		printf("%s\"%s\": %lu", i ? ", " : "", chosen[i]->name, counts[i]);
		idle |= !counts[i];
	}
	printf("}}\n");
	for (i = 0; i < nr; i++)
		if (!counts[i])
			fprintf(stderr, "stress: %s did nothing: its file is missing or refused each write; see stress --help\n",
				chosen[i]->name);
	return idle ? KZ_FAILED : KZ_OK;
}
