// SPDX-License-Identifier: GPL-2.0
/*
 * build_load: uses memory as a build does. It forks one process after the other; each executes a program,
 * fills memory of its own to the last byte, reads its input, writes an output, and ends.
 */
#include "common.h"

#define OUTPUT_BYTES (256UL * 1024)
#define SELF "/proc/self/exe"

static const char usage[] =
"usage: build_load [options]\n"
"Runs processes one after the other as a build does: each fills memory, reads this program's file,\n"
"writes 256 KiB to a file, and ends. Prints one JSON line.\n"
"  --steps N        processes (default 100)\n"
"  --size MB        memory that each of them fills (default 8)\n"
"  --folder PATH    folder for the outputs, which are removed in the end (default /tmp)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

/* The executed program: exit code only, since thousands of them may run. */
static int step(unsigned long bytes, const char *output)
{
	unsigned char *mem;
	ssize_t got;
	int in, out;

	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		kz_fail("cannot map %lu MB", bytes / KZ_MB);
	memset(mem, 0x6b, bytes);
	in = open(SELF, O_RDONLY | O_CLOEXEC);
	out = open(output, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (in < 0 || out < 0)
		kz_fail("cannot open %s", in < 0 ? SELF : output);
	while ((got = read(in, mem, bytes)) > 0)
		continue;
	if (got < 0 || write(out, mem, OUTPUT_BYTES) != (ssize_t)OUTPUT_BYTES)
		kz_fail("cannot %s", got < 0 ? "read " SELF : "write the output");
	return KZ_OK;
}

static void run_step(const char *size, const char *output)
{
	pid_t pid = fork();
	int status;

	if (pid < 0)
		kz_fail("fork");
	if (!pid) {
		execl(SELF, "build_load", "--size", size, "--one", output, (char *)NULL);
		_exit(KZ_BROKEN);
	}
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			kz_fail("waitpid");
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		kz_die(KZ_BROKEN, "a process of %s MB ended with status %#x: perhaps memory ran out; use a smaller --size",
		       size, status);
}

static uint64_t us(struct timeval t)
{
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_usec;
}

int main(int argc, char **argv)
{
	unsigned long steps = 100, megabytes = 8, i;
	const char *folder = "/tmp", *one = NULL;
	struct kz_vmstat before, after;
	char size[24], output[PATH_MAX];
	uint64_t start, wall;
	struct rusage spent;
	const struct kz_option options[] = {
		{ "steps", .number = &steps, .min = 1, .max = 1000000 },
		{ "size", .number = &megabytes, .min = 1, .max = 1UL << 20 },
		{ "folder", .text = &folder },
		{ "one", .text = &one },
		{ 0 },
	};

	kz_only_options(argc, argv, "build_load", usage, options);
	if (one)
		return step(megabytes * KZ_MB, one);
	if (snprintf(output, sizeof(output), "%s/build_load.%ld", folder, (long)getpid()) >=
	    (int)sizeof(output))
		kz_die(KZ_USAGE, "--folder: '%s' is too long; see build_load --help", folder);
	snprintf(size, sizeof(size), "%lu", megabytes);

	kz_vmstat_read(&before);
	start = kz_now_ns();
	for (i = 0; i < steps; i++)
		run_step(size, output);
	wall = kz_now_ns() - start;
	kz_vmstat_read(&after);
	unlink(output);
	if (getrusage(RUSAGE_CHILDREN, &spent))
		kz_fail("getrusage");
	printf("{\"steps\": %lu, \"bytes\": %lu, \"wall_ns\": %" PRIu64 ", \"user_us\": %" PRIu64
	       ", \"system_us\": %" PRIu64 ", \"minor_faults\": %ld, ",
	       steps, megabytes * KZ_MB, wall, us(spent.ru_utime), us(spent.ru_stime),
	       spent.ru_minflt);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	return KZ_OK;
}
