// SPDX-License-Identifier: GPL-2.0
/*
 * shmem_race: several processes write, read, map, fallocate, punch, truncate and collapse one file
 * of shmem at the same time. Each part of the file has one writer, which knows its content; all of
 * them allocate and collapse all of it. Free memory is dirtied and reported all the time.
 */
#include "common.h"

#include <signal.h>
#include <sys/mount.h>

#define PAGE 4096UL
#define FILE_SIZE (4 * KZ_HUGE)
#define PART (16 * PAGE)	/* what one writer owns */
#define STEPS 400UL
#define MAX_WORKERS 16UL

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static const char usage[] =
"usage: shmem_race [options]\n"
"Races for the folios of files in shmem; prints one JSON line with the result.\n"
"Options:\n"
"  --seconds S  (default 10)\n"
"  --workers N  processes that share a file (default 4)\n"
"  --seed N     (default 1)\n"
"  --help       this text\n"
"Exit: 0 all bytes are as they must be, 1 one is not, 2 bad usage, 3 the machine cannot do it.\n";

static const char tmpfs[] = "/tmp/shmem_race.tmpfs";

enum {
	WRITE,
	SHORT_WRITE,
	STORE,
	READ,
	LOAD,
	PUNCH,
	PUNCH_BYTES,
	FALLOCATE,
	COLLAPSE,
	PAGEOUT,
	FORGET,
	KINDS,
};
static const char *const kinds[KINDS] = {
	"write", "short_write", "store", "read", "load", "punch", "punch_bytes", "fallocate",
	"collapse", "pageout", "forget",
};
/* Out of 100 */
static const unsigned int shares[KINDS] = { 22, 8, 12, 14, 12, 8, 4, 10, 4, 3, 3 };

static struct shared {
	uint64_t done[KINDS], collapsed, shorter;
} *shared;

struct race {
	unsigned char *map, *known;	/* the file, and what this worker knows of it */
	unsigned char *source;		/* of a write; the page behind it cannot be read */
	unsigned long id, workers;
	int fd;
};

static void count(uint64_t *counter)
{
	__atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

static void wrong(const struct race *race, unsigned int kind, size_t at, unsigned char seen)
{
	printf("{\"violation\": {\"at\": %zu, \"page\": %zu, \"is\": %u, \"was\": %u, "
	       "\"found_by\": \"%s\"}}\n",
	       at % PAGE, at / PAGE, seen, race->known[at], kinds[kind]);
	fflush(stdout);
	_exit(KZ_FAILED);
}

static void compare(const struct race *race, unsigned int kind, const unsigned char *seen,
		    size_t at, size_t len)
{
	size_t i;

	if (!memcmp(seen, race->known + at, len))
		return;
	for (i = 0; i < len; i++)
		if (seen[i] != race->known[at + i])
			wrong(race, kind, at + i, seen[i]);
}

/* A range of a part that the worker owns. */
static size_t pick(const struct race *race, size_t *len)
{
	const unsigned long parts = FILE_SIZE / PART / race->workers;
	size_t part = (kz_between(0, parts - 1) * race->workers + race->id) * PART, at;

	switch (kz_between(0, 3)) {
	case 0:		/* whole pages */
		at = kz_between(0, PART / PAGE - 1) * PAGE;
		*len = kz_between(1, (PART - at) / PAGE) * PAGE;
		break;
	case 1:		/* one byte */
		at = kz_between(0, PART - 1);
		*len = 1;
		break;
	default:
		at = kz_between(0, PART - 1);
		*len = kz_between(1, PART - at < 2 * PAGE ? PART - at : 2 * PAGE);
	}
	return part + at;
}

static void step(const struct race *race)
{
	unsigned int share = kz_between(0, 99), kind = 0;
	unsigned char buf[PART], byte = kz_between(1, 255);
	size_t len, at = pick(race, &len);
	ssize_t done;

	while (kind < KINDS - 1 && share >= shares[kind])
		share -= shares[kind++];

	switch (kind) {
	case WRITE:
	case SHORT_WRITE:
		/* The copy of a short write fails in its middle. */
		done = kind == WRITE ? 0 : kz_between(0, len - 1);
		memset(race->source + PART - (len - done), byte, len - done);
		done = pwrite(race->fd, race->source + PART - (len - done), len, (off_t)at);
		if (done < 0 && errno != EFAULT && errno != ENOMEM && errno != ENOSPC)
			kz_fail("pwrite");
		if (done > 0)
			memset(race->known + at, byte, (size_t)done);
		if (kind == SHORT_WRITE && done > 0)
			count(&shared->shorter);
		break;
	case STORE:
		memset(race->map + at, byte, len);
		memset(race->known + at, byte, len);
		break;
	case READ:
		if (pread(race->fd, buf, len, (off_t)at) != (ssize_t)len)
			kz_fail("pread");
		compare(race, kind, buf, at, len);
		break;
	case LOAD:
		compare(race, kind, race->map + at, at, len);
		break;
	case PUNCH:
		at = at / PAGE * PAGE;
		len = PART - at % PART;
		/* fallthrough */
	case PUNCH_BYTES:
		if (fallocate(race->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)len))
			kz_fail("punch");
		memset(race->known + at, 0, len);
		break;
	case FALLOCATE:		/* all that is allocated stays as it is */
		at = kz_between(0, FILE_SIZE / PAGE - 1) * PAGE;
		if (fallocate(race->fd, FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)kz_between(1, FILE_SIZE - at)) &&
		    errno != EINTR && errno != ENOSPC && errno != ENOMEM)
			kz_fail("fallocate");
		break;
	case COLLAPSE:
		if (!madvise(race->map + kz_between(0, FILE_SIZE / KZ_HUGE - 1) * KZ_HUGE,
			     KZ_HUGE, MADV_COLLAPSE))
			count(&shared->collapsed);
		break;
	case PAGEOUT:
		madvise(race->map + at / PAGE * PAGE, PART, 21 /* MADV_PAGEOUT */);
		break;
	case FORGET:
		madvise(race->map, FILE_SIZE, MADV_DONTNEED);
		break;
	}
	count(&shared->done[kind]);
}

static int work(struct race *race, uint64_t seed)
{
	size_t at;
	unsigned long i;

	kz_rng_state = kz_mix(seed ^ (race->id << 32));
	race->known = kz_map(FILE_SIZE, 0);
	race->source = kz_map(PART + PAGE, 0);
	if (mprotect(race->source + PART, PAGE, PROT_NONE))
		kz_fail("mprotect");
	for (i = 0; i < STEPS; i++)
		step(race);
	for (at = race->id * PART; at < FILE_SIZE; at += race->workers * PART)
		compare(race, LOAD, race->map + at, at, PART);
	return KZ_OK;
}

/* A file in one of the ways in which folios of shmem get their size. */
static int new_file(uint64_t round)
{
	int fd = round % 3 == 2 ? open(tmpfs, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) :
			     memfd_create("race", MFD_CLOEXEC);

	if (fd < 0)
		kz_fail("a file of shmem");
	if (ftruncate(fd, FILE_SIZE))
		kz_fail("ftruncate");
	if (kz_percent(50) && fallocate(fd, 0, 0, FILE_SIZE) && errno != ENOSPC && errno != ENOMEM)
		kz_fail("fallocate");
	return fd;
}

/* Cuts the file, within a folio if it is large, and makes it longer again. */
static void cut(const struct race *race)
{
	size_t at = kz_between(1, FILE_SIZE - 1), bad;

	if (ftruncate(race->fd, (off_t)at) || ftruncate(race->fd, FILE_SIZE))
		kz_fail("ftruncate");
	bad = kz_first_nonzero(race->map + at, FILE_SIZE - at);
	if (bad < FILE_SIZE - at) {
		printf("{\"violation\": {\"page\": %zu, \"found_by\": \"truncate\"}}\n", (at + bad) / PAGE);
		exit(KZ_FAILED);
	}
}

/* Until it is killed: what was freed gets dirty, is reported, and moves. */
static void disturb(void)
{
	unsigned long i;

	for (i = 0; ; i++) {
		size_t bytes = kz_between(1, 64) * KZ_MB;
		unsigned char *mem = kz_map(bytes, 0);

		memset(mem, 0xa5, bytes);
		munmap(mem, bytes);
		kz_write_file("/sys/kernel/mm/page_reporting/flush", "0");
		if (!(i % 4))
			kz_write_file("/proc/sys/vm/compact_memory", "1");
		usleep(20000);
	}
}

int main(int argc, char **argv)
{
	unsigned long seconds = 10, workers = 4, seed = 1, i;
	struct race race = { 0 };
	const struct kz_option options[] = {
		{ "seconds", .number = &seconds, .min = 1, .max = 86400 },
		{ "workers", .number = &workers, .min = 1, .max = MAX_WORKERS },
		{ "seed", .number = &seed, .min = 0, .max = ~0UL },
		{ 0 },
	};
	uint64_t round, deadline;
	int status = KZ_OK;
	pid_t pids[MAX_WORKERS], disturber;

	kz_only_options(argc, argv, "shmem_race", usage, options);
	kz_rng_state = kz_mix(seed);
	shared = kz_map(sizeof(*shared), MAP_SHARED | MAP_ANONYMOUS);
	if ((mkdir(tmpfs, 0700) && errno != EEXIST) || mount("race", tmpfs, "tmpfs", 0, "huge=always"))
		kz_fail("cannot mount %s", tmpfs);
	kz_write_file("/proc/sys/vm/nr_overcommit_hugepages", "0");

	fflush(stdout);
	disturber = kz_fork();
	if (!disturber)
		disturb();

	deadline = kz_now_ns() + seconds * 1000000000ULL;
	for (round = 0; !status && kz_now_ns() < deadline; round++) {
		kz_write_file("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
			      round % 3 ? "always" : "never");
		race.fd = new_file(round);
		race.workers = workers;
		race.map = mmap(NULL, FILE_SIZE + KZ_HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (race.map == MAP_FAILED)
			kz_fail("cannot map the file");
		unsigned char *base = race.map;

		race.map = (unsigned char *)(((uintptr_t)base + KZ_HUGE - 1) & ~(KZ_HUGE - 1));
		if (mmap(race.map, FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
			 race.fd, 0) == MAP_FAILED)
			kz_fail("cannot map the file");
		for (i = 0; i < workers; i++) {
			pids[i] = kz_fork();
			if (!pids[i]) {
				race.id = i;
				_exit(work(&race, seed + round * 1000));
			}
		}
		for (i = 0; i < workers; i++) {
			int code = kz_wait(pids[i], NULL);

			if (code)
				status = code;
		}
		if (!status)
			cut(&race);
		munmap(base, FILE_SIZE + KZ_HUGE);
		close(race.fd);
	}
	kill(disturber, SIGKILL);
	waitpid(disturber, NULL, 0);
	umount(tmpfs);

	printf("{\"rounds\": %llu, \"collapsed\": %llu, \"short_writes\": %llu, \"steps\": {",
	       (unsigned long long)round, (unsigned long long)shared->collapsed,
	       (unsigned long long)shared->shorter);
	for (i = 0; i < KINDS; i++)
		printf("%s\"%s\": %llu", i ? ", " : "", kinds[i], (unsigned long long)shared->done[i]);
	printf("}}\n");
	return status;
}
