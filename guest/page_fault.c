// SPDX-License-Identifier: GPL-2.0
/*
 * page_fault: maps memory, touches every page of it, and unmaps it, over and over, in one process or
 * in several. Tells how many pages a second that makes, and what it costs to get one whole mapping.
 */
#include "common.h"

#include <getopt.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define PAGE 4096UL
#define MAX_TASKS 64UL

static void usage(FILE *out)
{
	fprintf(out,
"usage: page_fault [options]\n"
"Maps anonymous memory, writes a byte to each 4 KiB page, unmaps it, and begins again; prints one\n"
"JSON line. An iteration is a page touched; a cycle is a whole mapping, counted until it is touched.\n"
"  --tasks N        processes that do so side by side (default 1)\n"
"  --size MB        what each of them maps (default 128)\n"
"  --pages KIND     thp    huge pages (default)\n"
"                   nothp  4 KiB pages\n"
"  --ms N           how long (default 1000)\n"
"  --pause-ms N     how long to wait before the next mapping (default 0)\n"
"  --skip N         cycles of each process that are not counted as cycles (default 0)\n"
"  --cycles N       go on until each process has counted so many, however long (default 0)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n");
}

struct job {
	unsigned long bytes;
	unsigned long skip, cycles;
	uint64_t ns;
	useconds_t pause_us;
	bool huge;
};

/* What a process has done; in memory that it shares with the one that adds them up. */
struct task {
	uint64_t iterations, wall_ns;
	uint64_t cycles, cycle_wall_ns, cycle_cpu_ns;
};

static uint64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}

static void work(const struct job *job, struct task *task)
{
	uint64_t began = kz_now_ns(), now = began;
	unsigned long round;

	for (round = 0; now - began < job->ns || task->cycles < job->cycles; round++) {
		uint64_t start = kz_now_ns(), cpu = cpu_ns();
		volatile unsigned char *mem;
		size_t done = 0;

		mem = mmap(NULL, job->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			   -1, 0);
		if (mem == MAP_FAILED)
			kz_die(KZ_BROKEN, "cannot map %lu MB: %s", job->bytes / KZ_MB,
			       strerror(errno));
		if (job->huge && madvise((void *)mem, job->bytes, MADV_HUGEPAGE))
			kz_die(KZ_BROKEN, "MADV_HUGEPAGE: %s; the kernel has no THP",
			       strerror(errno));
		/* The time may be over before the mapping is: look at it now and then. */
		do {
			size_t end = done + KZ_HUGE < job->bytes ? done + KZ_HUGE : job->bytes;

			for (; done < end; done += PAGE)
				mem[done] = 1;
			now = kz_now_ns();
		} while (done < job->bytes &&
			 (now - began < job->ns || task->cycles < job->cycles));
		task->iterations += done / PAGE;
		if (done == job->bytes && round >= job->skip) {
			task->cycles++;
			task->cycle_wall_ns += now - start;
			task->cycle_cpu_ns += cpu_ns() - cpu;
		}
		munmap((void *)mem, job->bytes);
		if (job->pause_us)
			usleep(job->pause_us);
		now = kz_now_ns();
	}
	task->wall_ns = now - began;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "tasks", required_argument, NULL, 't' },
		{ "size", required_argument, NULL, 's' },
		{ "pages", required_argument, NULL, 'p' },
		{ "ms", required_argument, NULL, 'm' },
		{ "pause-ms", required_argument, NULL, 'w' },
		{ "skip", required_argument, NULL, 'k' },
		{ "cycles", required_argument, NULL, 'c' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	struct job job = { .bytes = 128 * KZ_MB, .ns = 1000000000ULL, .huge = true };
	unsigned long tasks = 1, i;
	struct task *task, sum = { 0 };
	struct kz_vmstat before, after;
	int ready[2], go[2], opt;
	double per_second = 0;
	pid_t pids[MAX_TASKS];

	kz_program = "page_fault";
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 't':
			tasks = kz_number("--tasks", optarg, 1, MAX_TASKS);
			break;
		case 's':
			job.bytes = kz_number("--size", optarg, 1, 1UL << 20) * KZ_MB;
			break;
		case 'p':
			if (strcmp(optarg, "thp") && strcmp(optarg, "nothp"))
				kz_die(KZ_USAGE, "--pages: '%s' is unknown; see --help", optarg);
			job.huge = !strcmp(optarg, "thp");
			break;
		case 'm':
			job.ns = kz_number("--ms", optarg, 1, 1000000) * 1000000ULL;
			break;
		case 'w':
			job.pause_us =
				(useconds_t)kz_number("--pause-ms", optarg, 0, 100000) * 1000;
			break;
		case 'k':
			job.skip = kz_number("--skip", optarg, 0, 1000000);
			break;
		case 'c':
			job.cycles = kz_number("--cycles", optarg, 0, 1000000);
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

	/* Of all sizes, and inherited: no madvise() in the loop that huge pages do not have. */
	if (!job.huge && prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		kz_die(KZ_BROKEN, "PR_SET_THP_DISABLE: %s", strerror(errno));
	task = mmap(NULL, tasks * sizeof(*task), PROT_READ | PROT_WRITE,
		    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (task == MAP_FAILED)
		kz_die(KZ_BROKEN, "mmap: %s", strerror(errno));
	if (pipe2(ready, O_CLOEXEC) || pipe2(go, O_CLOEXEC))
		kz_die(KZ_BROKEN, "pipe: %s", strerror(errno));
	for (i = 0; i < tasks; i++) {
		char byte = 0;

		pids[i] = fork();
		if (pids[i] < 0)
			kz_die(KZ_BROKEN, "fork: %s; %lu of %lu processes run", strerror(errno), i,
			       tasks);
		if (pids[i])
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(go[1]);
		/* All begin together: the other end is closed when every one of them is ready. */
		if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1))
			_exit(KZ_BROKEN);
		work(&job, &task[i]);
		_exit(KZ_OK);
	}
	for (i = 0; i < tasks; i++) {
		char byte;

		if (read(ready[0], &byte, 1) != 1)
			kz_die(KZ_BROKEN, "read: %s", strerror(errno));
	}
	kz_vmstat_read(&before);
	close(go[1]);
	for (i = 0; i < tasks; i++) {
		int status;

		while (waitpid(pids[i], &status, 0) < 0)
			if (errno != EINTR)
				kz_die(KZ_BROKEN, "waitpid: %s", strerror(errno));
		if (WIFSIGNALED(status))
			kz_die(KZ_BROKEN, "a process was killed by signal %d", WTERMSIG(status));
		if (WEXITSTATUS(status))
			return WEXITSTATUS(status);
		sum.iterations += task[i].iterations;
		sum.cycles += task[i].cycles;
		sum.cycle_wall_ns += task[i].cycle_wall_ns;
		sum.cycle_cpu_ns += task[i].cycle_cpu_ns;
		per_second += (double)task[i].iterations * 1e9 / (double)task[i].wall_ns;
	}
	kz_vmstat_read(&after);
	printf("{\"tasks\": %lu, \"pages\": \"%s\", \"bytes\": %lu, \"iterations\": %" PRIu64
	       ", \"per_second\": %.1f, \"cycles\": %" PRIu64 ", \"cycle_wall_ns\": %" PRIu64
	       ", \"cycle_cpu_ns\": %" PRIu64 ", ",
	       tasks, job.huge ? "thp" : "nothp", job.bytes, sum.iterations, per_second, sum.cycles,
	       sum.cycle_wall_ns, sum.cycle_cpu_ns);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	return KZ_OK;
}
