// SPDX-License-Identifier: GPL-2.0
/*
 * refpage_bench: what it costs to have memory that starts with a pattern, by several methods.
 *
 * Each repetition is a child process, measured from its exec to its exit: it maps a region, again
 * and again, has it start with the pattern, writes to the first byte of some of its pages, and
 * unmaps it.
 */
#include "common.h"

#include <getopt.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#ifndef __NR_refpage_create
#define __NR_refpage_create 473
#endif

#define PAGE 4096UL

enum method { MEMSET, REFPAGE, UFFD, MEMFD, NR_METHODS };

static const char *const method_names[] = { "memset", "refpage", "uffd", "memfd" };

static void usage(FILE *out)
{
	fprintf(out,
"usage: refpage_bench [options]\n"
"Maps memory that starts with a pattern, in a measured child process; one JSON line per repetition.\n"
"  --method METHOD  memset   anonymous memory, written with memset() (default)\n"
"                   refpage  a private mapping from refpage_create()\n"
"                   uffd     anonymous memory, filled by a userfaultfd thread\n"
"                   memfd    a private mapping of a memfd that holds the pattern\n"
"  --map BYTES      how much is mapped (default 4096000)\n"
"  --touch BYTES    how much of it is used: a byte is written in each page (default 4096)\n"
"  --byte BYTE      what the pattern consists of (default 0xaa)\n"
"  --loops N        how often it is mapped (default 1000)\n"
"  --reps N         repetitions (default 1)\n"
"  --nothp          no huge pages for the child\n"
"  --check          read what is mapped, all of it, before it is used; exit 1 if it is not the pattern\n"
"  --help           this text\n"
"Exit: 0 done, 1 memory did not hold the pattern, 2 bad usage, 3 the machine cannot do it.\n");
}

struct job {
	enum method method;
	unsigned long map, touch, loops;
	int byte;
	bool nothp, check;
	unsigned char *pattern;	/* one page */
	int fd;
};

static void *uffd_fill(void *arg)
{
	const struct job *job = arg;

	for (;;) {
		struct pollfd ready = { .fd = job->fd, .events = POLLIN };
		struct uffdio_copy copy = { 0 };
		struct uffd_msg msg;

		if (poll(&ready, 1, -1) != 1 || read(job->fd, &msg, sizeof(msg)) != sizeof(msg))
			continue;
		copy.dst = msg.arg.pagefault.address & ~(PAGE - 1);
		copy.src = (uintptr_t)job->pattern;
		copy.len = PAGE;
		ioctl(job->fd, UFFDIO_COPY, &copy);
	}
	return NULL;
}

static void set_up(struct job *job)
{
	struct uffdio_api api = { .api = UFFD_API };
	pthread_t thread;
	unsigned long at;

	job->pattern = aligned_alloc(PAGE, PAGE);
	if (!job->pattern)
		kz_die(KZ_BROKEN, "no memory");
	memset(job->pattern, job->byte, PAGE);

	switch (job->method) {
	case REFPAGE:
		job->fd = (int)syscall(__NR_refpage_create, job->pattern, PAGE, 0);
		if (job->fd < 0)
			kz_die(KZ_BROKEN, "refpage_create: %s", strerror(errno));
		break;
	case UFFD:
		job->fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
		if (job->fd < 0 || ioctl(job->fd, UFFDIO_API, &api))
			kz_die(KZ_BROKEN, "userfaultfd: %s", strerror(errno));
		if (pthread_create(&thread, NULL, uffd_fill, job))
			kz_die(KZ_BROKEN, "cannot start a thread");
		break;
	case MEMFD:
		job->fd = memfd_create("pattern", MFD_CLOEXEC);
		for (at = 0; job->fd >= 0 && at < job->map; at += PAGE)
			if (write(job->fd, job->pattern, PAGE) != (ssize_t)PAGE)
				kz_die(KZ_BROKEN, "memfd: %s", strerror(errno));
		if (job->fd < 0)
			kz_die(KZ_BROKEN, "memfd_create: %s", strerror(errno));
		break;
	default:
		job->fd = -1;
		break;
	}
}

static void one_loop(const struct job *job)
{
	const bool anon = job->method == MEMSET || job->method == UFFD;
	unsigned char *mem;
	unsigned long i;

	mem = mmap(NULL, job->map, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | (anon ? MAP_ANONYMOUS : 0), anon ? -1 : job->fd, 0);
	if (mem == MAP_FAILED)
		kz_die(KZ_BROKEN, "mmap: %s", strerror(errno));
	if (job->method == MEMSET)
		memset(mem, job->byte, job->map);
	if (job->method == UFFD) {
		struct uffdio_register reg = {
			.range = { (uintptr_t)mem, job->map },
			.mode = UFFDIO_REGISTER_MODE_MISSING,
		};

		if (ioctl(job->fd, UFFDIO_REGISTER, &reg))
			kz_die(KZ_BROKEN, "UFFDIO_REGISTER: %s", strerror(errno));
	}
	if (job->check)
		for (i = 0; i < job->map; i += PAGE)
			if (memcmp(mem + i, job->pattern, PAGE))
				kz_die(KZ_FAILED, "page %lu does not hold the pattern", i / PAGE);
	for (i = 0; i < job->touch; i += PAGE) {
		((volatile unsigned char *)mem)[i] = 0;
		/* The rest of the page is as it was. */
		if (job->check && memcmp(mem + i + 1, job->pattern + 1, PAGE - 1))
			kz_die(KZ_FAILED, "page %lu lost the pattern", i / PAGE);
	}
	if (munmap(mem, job->map))
		kz_die(KZ_BROKEN, "munmap: %s", strerror(errno));
}

/* What the measured child does. It ends the process. */
static void child_job(struct job *job)
{
	unsigned long loop;

	if (job->nothp)
		prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
	set_up(job);
	for (loop = 0; loop < job->loops; loop++)
		one_loop(job);
	_exit(KZ_OK);
}

static int measure(unsigned long rep, const struct job *job, char **worker_argv)
{
	struct kz_vmstat before, after;
	uint64_t start, wall;
	struct rusage usage;
	int status;
	pid_t pid;

	fflush(stdout);
	kz_vmstat_read(&before);
	start = kz_now_ns();
	pid = vfork();
	if (pid < 0)
		kz_die(KZ_BROKEN, "vfork: %s", strerror(errno));
	if (!pid) {
		execv("/proc/self/exe", worker_argv);
		_exit(KZ_BROKEN);
	}
	while (wait4(pid, &status, 0, &usage) < 0)
		if (errno != EINTR)
			kz_die(KZ_BROKEN, "wait4: %s", strerror(errno));
	wall = kz_now_ns() - start;
	kz_vmstat_read(&after);
	if (WIFSIGNALED(status))
		kz_die(KZ_BROKEN, "the measured child was killed by signal %d", WTERMSIG(status));
	if (WEXITSTATUS(status))
		return WEXITSTATUS(status);
	printf("{\"rep\": %lu, \"method\": \"%s\", \"map\": %lu, \"touch\": %lu, \"loops\": %lu, "
	       "\"nothp\": %s, \"wall_ns\": %" PRIu64 ", \"user_us\": %ld, \"system_us\": %ld, "
	       "\"max_rss_kb\": %ld, \"minor_faults\": %ld, ",
	       rep, method_names[job->method], job->map, job->touch, job->loops,
	       job->nothp ? "true" : "false", wall,
	       usage.ru_utime.tv_sec * 1000000L + usage.ru_utime.tv_usec,
	       usage.ru_stime.tv_sec * 1000000L + usage.ru_stime.tv_usec, usage.ru_maxrss,
	       usage.ru_minflt);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	fflush(stdout);
	return 0;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "method", required_argument, NULL, 'm' },
		{ "map", required_argument, NULL, 'b' },
		{ "touch", required_argument, NULL, 't' },
		{ "byte", required_argument, NULL, 'y' },
		{ "loops", required_argument, NULL, 'l' },
		{ "reps", required_argument, NULL, 'r' },
		{ "nothp", no_argument, NULL, 'n' },
		{ "check", no_argument, NULL, 'c' },
		{ "worker", no_argument, NULL, 'w' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	struct job job = { .map = 4096000, .touch = PAGE, .loops = 1000, .byte = 0xaa,
			   .fd = -1 };
	unsigned long reps = 1, rep;
	char **worker_argv;
	bool worker = false;
	int opt, error;

	kz_program = "refpage_bench";
	while ((opt = getopt_long(argc, argv, "+", options, NULL)) != -1) {
		switch (opt) {
		case 'm':
			for (job.method = 0; job.method < NR_METHODS; job.method++)
				if (!strcmp(optarg, method_names[job.method]))
					break;
			if (job.method == NR_METHODS)
				kz_die(KZ_USAGE, "--method: '%s' is not memset, refpage, uffd or memfd; see --help",
				       optarg);
			break;
		case 'b':
			job.map = kz_number("--map", optarg, PAGE, SIZE_MAX >> 1);
			break;
		case 't':
			job.touch = kz_number("--touch", optarg, 0, SIZE_MAX >> 1);
			break;
		case 'y':
			job.byte = (int)kz_number("--byte", optarg, 0, 255);
			break;
		case 'l':
			job.loops = kz_number("--loops", optarg, 1, 1000000000);
			break;
		case 'r':
			reps = kz_number("--reps", optarg, 1, 1000000);
			break;
		case 'n':
			job.nothp = true;
			break;
		case 'c':
			job.check = true;
			break;
		case 'w':
			worker = true;
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
		kz_die(KZ_USAGE, "'%s' is left over; see --help", argv[optind]);
	if (job.touch > job.map)
		kz_die(KZ_USAGE, "--touch: %lu is more than the %lu bytes of --map", job.touch, job.map);
	if (worker)
		child_job(&job);

	worker_argv = calloc((size_t)argc + 2, sizeof(*worker_argv));
	if (!worker_argv)
		kz_die(KZ_BROKEN, "no memory");
	memcpy(worker_argv, argv, (size_t)argc * sizeof(*argv));
	worker_argv[argc] = (char *)"--worker";
	for (rep = 0; rep < reps; rep++) {
		error = measure(rep, &job, worker_argv);
		if (error)
			return error;
	}
	return KZ_OK;
}
