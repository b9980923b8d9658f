// SPDX-License-Identifier: GPL-2.0
/*
 * leak_hunter: makes free memory dirty and then takes memory in every way a program can, reading
 * every byte that must be zero. One byte that is not is a leak: it is printed and the program
 * fails. A way that this kernel does not offer is named with the reason and never counted.
 */
#include "common.h"

#include <dirent.h>
#include <getopt.h>
#include <linux/aio_abi.h>
#include <linux/bpf.h>
#include <linux/dma-heap.h>
#include <linux/if_packet.h>
#include <linux/io_uring.h>
#include <linux/magic.h>
#include <linux/perf_event.h>
#include <linux/udmabuf.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

#define PAGE 4096UL
#define MAX_KINDS 64
#define MAX_WORKERS 16

/* What the workers share with the parent. */
struct tally {
	uint64_t pages;
	uint64_t runs;
	uint64_t failed;
	char reason[120];
};

static struct shared {
	struct tally kind[MAX_KINDS];
	uint64_t dirtied_bytes;
	uint64_t flushes;
	uint64_t violations;
	uint64_t turns;
} *shared;

struct kind {
	char name[24];
	long (*run)(const struct kind *kind);
	unsigned long bytes;
};

static struct kind kinds[MAX_KINDS];
static int nr_kinds;

static unsigned char fill_byte = 0x5a;
static uint64_t rng_state;
static unsigned long seed;
static const char *current_kind = "none";
static char why[120];

static uint64_t rng(void)
{
	rng_state ^= rng_state << 13;
	rng_state ^= rng_state >> 7;
	rng_state ^= rng_state << 17;
	return rng_state;
}

static unsigned long between(unsigned long low, unsigned long high)
{
	return low + rng() % (high - low + 1);
}

/* A kind that could not run returns this. */
static long cannot(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

static long cannot(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	return -1;
}

static void leak(const void *at, size_t offset, unsigned char value) __attribute__((noreturn));

static void leak(const void *at, size_t offset, unsigned char value)
{
	char line[320];
	int len = snprintf(line, sizeof(line),
			   "{\"violation\": {\"kind\": \"%s\", \"address\": \"%p\", "
			   "\"offset\": %zu, \"page_offset\": %lu, \"value\": %u, "
			   "\"pid\": %d, \"seed\": %lu}}\n",
			   current_kind, at, offset, ((uintptr_t)at + offset) % PAGE, value,
			   (int)getpid(), seed);

	__atomic_add_fetch(&shared->violations, 1, __ATOMIC_RELAXED);
	if (write(STDOUT_FILENO, line, (size_t)len) < 0)
		_exit(KZ_BROKEN);
	_exit(KZ_FAILED);
}

static long pages_of(size_t bytes)
{
	return (long)((bytes + PAGE - 1) / PAGE);
}

/* --plant: proof that the hunter sees a byte that is not zero. */
static bool plant;

static void must_be_zero(const void *mem, size_t bytes)
{
	size_t bad;

	if (plant && bytes)
		((volatile unsigned char *)(uintptr_t)mem)[bytes - 1] = fill_byte;
	bad = kz_first_nonzero(mem, bytes);

	if (bad < bytes)
		leak(mem, bad, ((const unsigned char *)mem)[bad]);
}

static void soil(void *mem, size_t bytes)
{
	memset(mem, fill_byte, bytes);
}

/*
 * Faults memory in for writing, either all at once or page by page, at a random place of each
 * page. False if memory is short.
 */
static bool fault_in(unsigned char *mem, size_t bytes)
{
	size_t i;

	if (rng() & 1)
		return !madvise(mem, bytes, MADV_POPULATE_WRITE);
	for (i = 0; i < bytes; i += PAGE)
		((volatile unsigned char *)mem)[i + rng() % PAGE] = 0;
	return true;
}

static long check_fresh(unsigned char *mem, size_t bytes)
{
	if (!fault_in(mem, bytes))
		return cannot("cannot populate: %s", strerror(errno));
	must_be_zero(mem, bytes);
	soil(mem, bytes);
	return pages_of(bytes);
}

static unsigned char *map_private(size_t bytes, int flags)
{
	unsigned char *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	if (mem == MAP_FAILED) {
		cannot("mmap: %s", strerror(errno));
		return NULL;
	}
	return mem;
}

/* A mapping of exactly bytes, aligned to its size, with nothing it could merge with beside it. */
struct island {
	unsigned char *base, *mem;
	size_t total;
};

static bool island_map(struct island *is, size_t bytes, size_t align)
{
	is->total = bytes + 2 * align;
	is->base = mmap(NULL, is->total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			-1, 0);
	if (is->base == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno)), false;
	is->mem = (unsigned char *)(((uintptr_t)is->base + align) & ~(align - 1));
	if (mprotect(is->mem, bytes, PROT_READ | PROT_WRITE)) {
		cannot("mprotect: %s", strerror(errno));
		munmap(is->base, is->total);
		return false;
	}
	return true;
}

/* --- anonymous memory --- */

static long run_anon(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 2048) * PAGE;
	unsigned char *mem = map_private(bytes, rng() % 4 ? 0 : MAP_POPULATE);
	long pages;

	if (!mem)
		return -1;
	madvise(mem, bytes, MADV_NOHUGEPAGE);
	pages = check_fresh(mem, bytes);
	munmap(mem, bytes);
	return pages;
}

static long run_folio(const struct kind *kind)
{
	struct island is;
	long pages = 0;
	int n = (int)between(1, kind->bytes >= KZ_HUGE ? 8 : 32);

	while (n--) {
		long got;

		if (!island_map(&is, kind->bytes, kind->bytes))
			return -1;
		madvise(is.mem, kind->bytes, MADV_HUGEPAGE);
		got = check_fresh(is.mem, kind->bytes);
		munmap(is.base, is.total);
		if (got < 0)
			return -1;
		pages += got;
	}
	return pages;
}

static long run_brk(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 1024) * PAGE;
	unsigned char *mem;
	long pages;
	char *end = sbrk(0);
	size_t pad = (PAGE - (uintptr_t)end % PAGE) % PAGE;

	mem = sbrk((intptr_t)(bytes + pad));
	if (mem == (void *)-1)
		return cannot("sbrk: %s", strerror(errno));
	pages = check_fresh(mem + pad, bytes);
	if (sbrk(-(intptr_t)(bytes + pad)) == (void *)-1)
		return cannot("sbrk back: %s", strerror(errno));
	return pages;
}

/* Where the stack mapping starts now; the stack grows below it. */
static uintptr_t stack_start(void)
{
	char line[256];
	uintptr_t start = 0;
	FILE *f = fopen("/proc/self/maps", "re");

	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f))
		if (strstr(line, "[stack]"))
			start = strtoul(line, NULL, 16);
	fclose(f);
	return start;
}

/* Runs body in a child, so that what it grows, limits or breaks is gone with it. */
static long in_child(long (*body)(void))
{
	int status, fds[2];
	long pages = -1;
	pid_t pid;

	if (pipe2(fds, O_CLOEXEC))
		return cannot("pipe: %s", strerror(errno));
	pid = fork();
	if (!pid) {
		struct { long pages; char why[sizeof(why)]; } said;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		rng_state += 1;
		said.pages = body();
		memcpy(said.why, why, sizeof(why));
		_exit(write(fds[1], &said, sizeof(said)) == sizeof(said) ? 0 : KZ_BROKEN);
	}
	close(fds[1]);
	if (pid < 0) {
		cannot("fork: %s", strerror(errno));
	} else {
		struct { long pages; char why[sizeof(why)]; } heard;

		if (read(fds[0], &heard, sizeof(heard)) == sizeof(heard)) {
			pages = heard.pages;
			memcpy(why, heard.why, sizeof(why));
		} else {
			cannot("the child ended early");
		}
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
		if (WIFEXITED(status) && WEXITSTATUS(status) == KZ_FAILED)
			_exit(KZ_FAILED);
		/* A killed child means memory ran out; any other signal is a broken kernel. */
		if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
			raise(WTERMSIG(status));
	}
	close(fds[0]);
	return pages;
}

static long stack_body(void)
{
	size_t pages = between(1, 512), i;
	unsigned char *top = (unsigned char *)stack_start();

	if (!top)
		return cannot("no [stack] in /proc/self/maps");
	for (i = 1; i <= pages; i++)
		((volatile unsigned char *)top)[rng() % PAGE - i * PAGE] = 0;
	must_be_zero(top - pages * PAGE, pages * PAGE);
	return (long)pages;
}

static long run_stack(const struct kind *kind KZ_MAYBE_UNUSED)
{
	return in_child(stack_body);
}

static unsigned char *cow_mem;
static size_t cow_bytes;

static long cow_body(void)
{
	size_t i;

	for (i = 0; i < cow_bytes; i += PAGE)
		((volatile unsigned char *)cow_mem)[i + rng() % PAGE] = 0;
	must_be_zero(cow_mem, cow_bytes);
	soil(cow_mem, cow_bytes);
	return pages_of(cow_bytes);
}

static long run_fork_cow(const struct kind *kind KZ_MAYBE_UNUSED)
{
	long pages;
	size_t i;

	cow_bytes = between(1, 512) * PAGE;
	cow_mem = map_private(cow_bytes, 0);
	if (!cow_mem)
		return -1;
	/* Read first: the shared zero page is what the child copies. */
	for (i = 0; i < cow_bytes; i += PAGE)
		if (((volatile unsigned char *)cow_mem)[i])
			leak(cow_mem, i, cow_mem[i]);
	pages = in_child(cow_body);
	must_be_zero(cow_mem, cow_bytes);
	munmap(cow_mem, cow_bytes);
	return pages;
}

static long run_dontneed(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 1024) * PAGE;
	unsigned char *mem = map_private(bytes, 0);
	long pages;

	if (!mem)
		return -1;
	madvise(mem, bytes, rng() & 1 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	soil(mem, bytes);
	madvise(mem, bytes, MADV_DONTNEED);
	pages = check_fresh(mem, bytes);
	munmap(mem, bytes);
	return pages;
}

static long run_mremap(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t old = between(1, 64) * PAGE, grown = old + between(1, 512) * PAGE;
	unsigned char *mem = map_private(old, 0), *moved;
	long pages;

	if (!mem)
		return -1;
	soil(mem, old);
	moved = mremap(mem, old, grown, MREMAP_MAYMOVE);
	if (moved == MAP_FAILED) {
		munmap(mem, old);
		return cannot("mremap: %s", strerror(errno));
	}
	pages = check_fresh(moved + old, grown - old);
	mem = mremap(moved, grown, grown, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
	if (mem != MAP_FAILED) {
		/* The place they were moved from is empty again. */
		long more = check_fresh(moved, grown);

		if (pages >= 0 && more > 0)
			pages += more;
		munmap(mem, grown);
	}
	munmap(moved, grown);
	return pages;
}

static long run_locked(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 256) * PAGE;
	unsigned char *mem = map_private(bytes, 0);

	if (!mem)
		return -1;
	if (mlock(mem, bytes)) {
		munmap(mem, bytes);
		return cannot("mlock: %s", strerror(errno));
	}
	must_be_zero(mem, bytes);
	soil(mem, bytes);
	munmap(mem, bytes);
	return pages_of(bytes);
}

static long run_dev_zero(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 512) * PAGE;
	int fd = open("/dev/zero", O_RDWR | O_CLOEXEC);
	unsigned char *mem;
	long pages;

	if (fd < 0)
		return cannot("/dev/zero: %s", strerror(errno));
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, rng() & 1 ? MAP_SHARED : MAP_PRIVATE, fd,
		   0);
	close(fd);
	if (mem == MAP_FAILED)
		return cannot("mmap /dev/zero: %s", strerror(errno));
	pages = check_fresh(mem, bytes);
	munmap(mem, bytes);
	return pages;
}

/* One mebibyte of bss: its pages, and the tail of the page it shares with data, start as zero. */
static unsigned char bss_area[KZ_MB];

static long bss_body(void)
{
	char kind_arg[32];

	snprintf(kind_arg, sizeof(kind_arg), "%lu", seed);
	execl("/proc/self/exe", "leak_hunter", "--check-bss", kind_arg, (char *)NULL);
	return cannot("exec: %s", strerror(errno));
}

static long run_bss(const struct kind *kind KZ_MAYBE_UNUSED)
{
	int status;
	pid_t pid = fork();

	if (pid < 0)
		return cannot("fork: %s", strerror(errno));
	if (!pid) {
		bss_body();
		_exit(KZ_BROKEN);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (WIFEXITED(status) && WEXITSTATUS(status) == KZ_FAILED) {
		__atomic_add_fetch(&shared->violations, 1, __ATOMIC_RELAXED);
		_exit(KZ_FAILED);
	}
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		return cannot("the exec'd child ended with status 0x%x", status);
	return pages_of(sizeof(bss_area));
}

/* --- page tables: nothing to read, but an entry that is not zero would show as present --- */

static long run_page_tables(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t tables = between(1, 256), bytes = tables * KZ_HUGE, t;
	unsigned char *mem = map_private(bytes, MAP_NORESERVE);
	uint64_t entries[512];
	int fd;

	if (!mem)
		return -1;
	madvise(mem, bytes, MADV_NOHUGEPAGE);
	fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		munmap(mem, bytes);
		return cannot("/proc/self/pagemap: %s", strerror(errno));
	}
	for (t = 0; t < tables; t++)
		((volatile unsigned char *)mem)[t * KZ_HUGE + PAGE * (rng() % 512)] = 1;
	for (t = 0; t < tables; t++) {
		uintptr_t at = (uintptr_t)mem + t * KZ_HUGE;
		int i, present = 0;

		if (pread(fd, entries, sizeof(entries), (off_t)(at / PAGE * 8)) !=
		    (ssize_t)sizeof(entries))
			break;
		for (i = 0; i < 512; i++)
			present += !!(entries[i] >> 62);
		/* One page was touched; if its neighbours seem mapped, the table held junk. */
		if (present != 1)
			leak((void *)at, 0, (unsigned char)present);
	}
	close(fd);
	munmap(mem, bytes);
	return t == tables ? (long)tables : cannot("short read of pagemap");
}

/* --- files in memory --- */

static int new_memfd(unsigned int flags)
{
	int fd = memfd_create("leak_hunter", MFD_CLOEXEC | flags);

	if (fd < 0)
		cannot("memfd_create: %s", strerror(errno));
	return fd;
}

static unsigned char *file_buffer(void)
{
	static unsigned char buffer[64 * PAGE];

	memset(buffer, 0xee, sizeof(buffer));
	return buffer;
}

/* Reads a whole small file back: all of it but [skip_from, skip_to) must be zero. */
static long file_is_zero(int fd, size_t bytes, size_t skip_from, size_t skip_to)
{
	unsigned char *buffer = file_buffer();

	if (bytes > 64 * PAGE || pread(fd, buffer, bytes, 0) != (ssize_t)bytes)
		return cannot("pread: %s", strerror(errno));
	must_be_zero(buffer, skip_from);
	if (skip_to < bytes)
		must_be_zero(buffer + skip_to, bytes - skip_to);
	return pages_of(bytes);
}

static long run_shmem_write(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 64) * PAGE, at = between(0, bytes - 64);
	int fd = new_memfd(0);
	long pages = -1;

	if (fd < 0)
		return -1;
	/* A short write into a new page, and the rest of that page and of the file is a hole. */
	if (ftruncate(fd, (off_t)bytes) || pwrite(fd, "hunter", 6, (off_t)at) != 6)
		cannot("write: %s", strerror(errno));
	else
		pages = file_is_zero(fd, bytes, at, at + 6);
	close(fd);
	return pages;
}

static long run_shmem_fallocate(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 64) * PAGE;
	int fd = new_memfd(0);
	long pages = -1;

	if (fd < 0)
		return -1;
	if (fallocate(fd, 0, 0, (off_t)bytes)) {
		cannot("fallocate: %s", strerror(errno));
	} else if (rng() & 1) {
		pages = file_is_zero(fd, bytes, bytes, bytes);
	} else {
		/* Allocated and not yet up to date; a short write must not reveal the rest. */
		size_t at = between(0, bytes - 64);

		if (pwrite(fd, "hunter", 6, (off_t)at) == 6)
			pages = file_is_zero(fd, bytes, at, at + 6);
		else
			cannot("write: %s", strerror(errno));
	}
	close(fd);
	return pages;
}

static long shared_mapping(int fd, size_t bytes, int advice)
{
	unsigned char *mem;
	long pages;

	if (ftruncate(fd, (off_t)bytes))
		return cannot("ftruncate: %s", strerror(errno));
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mem == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno));
	madvise(mem, bytes, advice);
	pages = check_fresh(mem, bytes);
	if (pages > 0 && !fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
				    (off_t)bytes)) {
		/* What was punched out comes back as zero. */
		long again = check_fresh(mem, bytes);

		pages = again < 0 ? again : pages + again;
	}
	munmap(mem, bytes);
	return pages;
}

static long run_shmem_mmap(const struct kind *kind KZ_MAYBE_UNUSED)
{
	int fd = new_memfd(0);
	long pages;

	if (fd < 0)
		return -1;
	pages = shared_mapping(fd, between(1, 1024) * PAGE, MADV_NOHUGEPAGE);
	close(fd);
	return pages;
}

static long run_shmem_huge(const struct kind *kind KZ_MAYBE_UNUSED)
{
	int fd = new_memfd(0);
	long pages;

	if (fd < 0)
		return -1;
	pages = shared_mapping(fd, between(1, 4) * KZ_HUGE, MADV_HUGEPAGE);
	close(fd);
	return pages;
}

static const char *tmpfs_dir;

static long run_tmpfs_huge(const struct kind *kind KZ_MAYBE_UNUSED)
{
	unsigned char *buffer = file_buffer();
	size_t bytes = between(1, 4) * KZ_HUGE, at, done;
	long pages = 0;
	int fd;

	if (!tmpfs_dir)
		return cannot("no tmpfs with huge=always is mounted");
	fd = open(tmpfs_dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (fd < 0)
		return cannot("O_TMPFILE: %s", strerror(errno));
	at = between(0, bytes / PAGE - 1) * PAGE;
	if (pwrite(fd, "hunter", 6, (off_t)at) != 6 || ftruncate(fd, (off_t)bytes)) {
		close(fd);
		return cannot("write: %s", strerror(errno));
	}
	for (done = 0; done < bytes; done += 64 * PAGE) {
		if (pread(fd, buffer, 64 * PAGE, (off_t)done) != 64 * (ssize_t)PAGE) {
			pages = cannot("pread: %s", strerror(errno));
			break;
		}
		if (at >= done && at < done + 64 * PAGE)
			memset(buffer + (at - done), 0, 6);
		must_be_zero(buffer, 64 * PAGE);
		pages += 64;
	}
	close(fd);
	return pages;
}

static long run_file_tail(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t used = between(1, PAGE - 1);
	int fd = new_memfd(0);
	unsigned char *mem;

	if (fd < 0)
		return -1;
	if (pwrite(fd, file_buffer(), used, 0) != (ssize_t)used) {
		close(fd);
		return cannot("write: %s", strerror(errno));
	}
	mem = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	close(fd);
	if (mem == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno));
	/* Beyond the end of the file: first in the page cache, then in the private copy. */
	must_be_zero(mem + used, PAGE - used);
	((volatile unsigned char *)mem)[0] = 1;
	must_be_zero(mem + used, PAGE - used);
	munmap(mem, PAGE);
	return 2;
}

static long run_splice_tail(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t used = between(1, PAGE - 1);
	int fd = new_memfd(0), pipefd[2] = { -1, -1 }, sock[2] = { -1, -1 };
	long pages = -1;

	if (fd < 0)
		return -1;
	if (pipe2(pipefd, O_CLOEXEC)) {
		cannot("pipe: %s", strerror(errno));
		goto out;
	}
	/*
	 * Socket buffer -> pipe page -> file page; the file is then made a whole page long. A
	 * kernel without sockets starts at the pipe.
	 */
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sock)) {
		if (write(pipefd[1], file_buffer(), used) != (ssize_t)used) {
			cannot("pipe write: %s", strerror(errno));
			goto out;
		}
	} else if (send(sock[0], file_buffer(), used, 0) != (ssize_t)used ||
	    splice(sock[1], NULL, pipefd[1], NULL, used, 0) != (ssize_t)used) {
		cannot("splice from a socket: %s", strerror(errno));
		goto out;
	}
	if (splice(pipefd[0], NULL, fd, NULL, used, 0) != (ssize_t)used ||
	    ftruncate(fd, PAGE)) {
		cannot("splice to a file: %s", strerror(errno));
		goto out;
	}
	pages = file_is_zero(fd, PAGE, 0, used);
out:
	close(fd);
	if (pipefd[0] >= 0) {
		close(pipefd[0]);
		close(pipefd[1]);
	}
	if (sock[0] >= 0) {
		close(sock[0]);
		close(sock[1]);
	}
	return pages;
}

static long run_sysv_shm(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 256) * PAGE;
	int id = shmget(IPC_PRIVATE, bytes, IPC_CREAT | 0600);
	unsigned char *mem;
	long pages;

	if (id < 0)
		return cannot("shmget: %s", strerror(errno));
	mem = shmat(id, NULL, 0);
	shmctl(id, IPC_RMID, NULL);
	if (mem == (void *)-1)
		return cannot("shmat: %s", strerror(errno));
	pages = check_fresh(mem, bytes);
	shmdt(mem);
	return pages;
}

static long run_memfd_secret(const struct kind *kind KZ_MAYBE_UNUSED)
{
#ifdef SYS_memfd_secret
	size_t bytes = between(1, 64) * PAGE;
	int fd = (int)syscall(SYS_memfd_secret, O_CLOEXEC);
	unsigned char *mem;
	size_t i;

	if (fd < 0)
		return cannot("memfd_secret: %s", strerror(errno));
	if (ftruncate(fd, (off_t)bytes)) {
		close(fd);
		return cannot("ftruncate: %s", strerror(errno));
	}
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (mem == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno));
	for (i = 0; i < bytes; i += PAGE)
		((volatile unsigned char *)mem)[i] = 0;
	must_be_zero(mem, bytes);
	munmap(mem, bytes);
	return pages_of(bytes);
#else
	return cannot("the C library does not know memfd_secret");
#endif
}

/* --- hugetlb --- */

/* Never touched unless populated: a pool that shrank meanwhile would mean SIGBUS. */
static long check_populated(unsigned char *mem, size_t bytes)
{
	if (madvise(mem, bytes, MADV_POPULATE_WRITE))
		return cannot("cannot populate: %s", strerror(errno));
	must_be_zero(mem, bytes);
	soil(mem, bytes);
	return pages_of(bytes);
}

static long hugetlb_map(size_t pages, int extra, size_t page_bytes)
{
	size_t bytes = pages * page_bytes;
	unsigned char *mem = map_private(bytes, MAP_HUGETLB | extra);
	long checked;

	if (!mem)
		return -1;
	checked = check_populated(mem, bytes);
	munmap(mem, bytes);
	return checked;
}

static long run_hugetlb_pool(const struct kind *kind KZ_MAYBE_UNUSED)
{
	return hugetlb_map(between(1, 4), 0, KZ_HUGE);
}

static long run_hugetlb_surplus(const struct kind *kind KZ_MAYBE_UNUSED)
{
	/* More than the pool has: the rest is surplus, straight from the allocator. */
	return hugetlb_map(between(9, 20), 0, KZ_HUGE);
}

static long run_hugetlb_noreserve(const struct kind *kind KZ_MAYBE_UNUSED)
{
	/* Nothing is reserved: what the pool does not have is allocated by the fault itself. */
	return hugetlb_map(between(9, 20), MAP_NORESERVE, KZ_HUGE);
}

static long run_hugetlb_1g(const struct kind *kind KZ_MAYBE_UNUSED)
{
	return hugetlb_map(1, 30 << 26, 1UL << 30);
}

/* Pieces that are not all alike make one folio, in the fault. */
static long run_hugetlb_1g_noreserve(const struct kind *kind KZ_MAYBE_UNUSED)
{
	return hugetlb_map(1, 30 << 26 | MAP_NORESERVE, 1UL << 30);
}

#define POOL "/proc/sys/vm/nr_hugepages"
#define POOL_1G "/sys/kernel/mm/hugepages/hugepages-1048576kB/"

static long pool_size(const char *path)
{
	char text[32];

	return kz_read_file(path, text, sizeof(text)) < 0 ? -1 : atol(text);
}

/* Set by --setup: this is a guest that nobody minds being changed. */
static bool throwaway;

/* Changes the size of a pool. How much it has grown, which may be less than was asked for. */
static long resize_pool(const char *path, long by)
{
	long before = pool_size(path), after;
	char text[32];

	if (before < 0 || !throwaway)
		return 0;
	snprintf(text, sizeof(text), "%ld", before + by < 0 ? 0 : before + by);
	if (kz_write_file(path, text))
		return 0;
	after = pool_size(path);
	return after - before;
}

static long run_hugetlb_grow(const struct kind *kind KZ_MAYBE_UNUSED)
{
	long grown = resize_pool(POOL, (long)between(1, 16)), pages;

	if (grown <= 0)
		return cannot("the pool of huge pages does not grow, or may not (--setup)");
	pages = hugetlb_map((size_t)grown, 0, KZ_HUGE);
	resize_pool(POOL, -grown);
	return pages;
}

/* Parts of what was a page of 1 GiB. */
static long run_hugetlb_demote(const struct kind *kind KZ_MAYBE_UNUSED)
{
	long before = pool_size(POOL), pages;

	if (!throwaway)
		return cannot("pools are left alone without --setup");
	if (pool_size(POOL_1G "nr_hugepages") < 1 && resize_pool(POOL_1G "nr_hugepages", 1) < 1)
		return cannot("no page of 1 GiB to be had");
	if (kz_write_file(POOL_1G "demote", "1"))
		return cannot("cannot demote: %s", strerror(errno));
	pages = hugetlb_map(between(64, 256), 0, KZ_HUGE);
	resize_pool(POOL, before - pool_size(POOL));
	return pages;
}

static long run_hugetlb_file(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 4) * KZ_HUGE;
	char path[] = "/dev/hugepages/hunter.XXXXXX";
	struct statfs fs = { 0 };
	unsigned char *mem;
	long pages = -1;
	int fd = mkstemp(path);

	if (fd < 0)
		return cannot("%s: %s", path, strerror(errno));
	unlink(path);
	if (fstatfs(fd, &fs) || (unsigned long)fs.f_type != HUGETLBFS_MAGIC) {
		/* Without hugetlbfs it is a folder like any other. */
		cannot("%s: not on hugetlbfs", path);
	} else if (ftruncate(fd, (off_t)bytes)) {
		cannot("ftruncate: %s", strerror(errno));
	} else if (rng() & 1 && fallocate(fd, 0, (off_t)(bytes - KZ_HUGE), (off_t)KZ_HUGE)) {
		cannot("fallocate: %s", strerror(errno));
	} else {
		mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			   rng() & 1 ? MAP_SHARED : MAP_PRIVATE, fd, 0);
		if (mem == MAP_FAILED) {
			cannot("mmap: %s", strerror(errno));
		} else {
			pages = check_populated(mem, bytes);
			munmap(mem, bytes);
		}
	}
	close(fd);
	return pages;
}

/* A copy of a huge page is a copy, whatever was known of the page it is made in. */
static long hugetlb_cow_body(void)
{
	size_t i;

	if (madvise(cow_mem, cow_bytes, MADV_POPULATE_WRITE))
		return cannot("cannot populate the copy: %s", strerror(errno));
	for (i = 0; i < cow_bytes; i++)
		if (cow_mem[i] != fill_byte)
			leak(cow_mem, i, cow_mem[i]);
	return pages_of(cow_bytes);
}

static long run_hugetlb_cow(const struct kind *kind KZ_MAYBE_UNUSED)
{
	long pages;

	cow_bytes = between(1, 2) * KZ_HUGE;
	cow_mem = map_private(cow_bytes, MAP_HUGETLB);
	if (!cow_mem)
		return -1;
	pages = check_populated(cow_mem, cow_bytes);
	if (pages > 0)
		pages = in_child(hugetlb_cow_body);
	munmap(cow_mem, cow_bytes);
	return pages;
}

/* A file of huge pages that a driver pins before anybody has touched it. */
static long run_hugetlb_udmabuf(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 4) * KZ_HUGE;
	struct udmabuf_create create = { .flags = UDMABUF_FLAGS_CLOEXEC, .size = bytes };
	int fd = new_memfd(MFD_HUGETLB | MFD_ALLOW_SEALING), dev, buf = -1;
	unsigned char *mem;
	long pages = -1;

	if (fd < 0)
		return -1;
	dev = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	if (dev < 0) {
		cannot("/dev/udmabuf: %s", strerror(errno));
	} else if (ftruncate(fd, (off_t)bytes) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)) {
		cannot("seal: %s", strerror(errno));
	} else {
		create.memfd = (uint32_t)fd;
		buf = ioctl(dev, UDMABUF_CREATE, &create);
		if (buf < 0)
			cannot("UDMABUF_CREATE: %s", strerror(errno));
	}
	if (buf >= 0) {
		mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (mem == MAP_FAILED) {
			cannot("mmap: %s", strerror(errno));
		} else {
			pages = check_populated(mem, bytes);
			munmap(mem, bytes);
		}
		close(buf);
	}
	if (dev >= 0)
		close(dev);
	close(fd);
	return pages;
}

static long run_hugetlb_memfd(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(1, 4) * KZ_HUGE;
	int fd = new_memfd(MFD_HUGETLB);
	unsigned char *mem;
	long pages = -1;

	if (fd < 0)
		return -1;
	if (fallocate(fd, 0, 0, (off_t)bytes)) {
		cannot("fallocate: %s", strerror(errno));
		goto out;
	}
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mem == MAP_FAILED) {
		cannot("mmap: %s", strerror(errno));
		goto out;
	}
	if (madvise(mem, bytes, MADV_POPULATE_WRITE)) {
		cannot("cannot populate: %s", strerror(errno));
	} else {
		must_be_zero(mem, bytes);
		soil(mem, bytes);
		pages = pages_of(bytes);
	}
	munmap(mem, bytes);
out:
	close(fd);
	return pages;
}

/* --- memory the kernel allocates for itself and maps into the program --- */

static long run_perf_ring(const struct kind *kind KZ_MAYBE_UNUSED)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_SW_DUMMY,
		.disabled = 1,
	};
	size_t data = PAGE << between(0, 6);
	int fd = (int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
	unsigned char *mem;

	if (fd < 0)
		return cannot("perf_event_open: %s", strerror(errno));
	mem = mmap(NULL, PAGE + data, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (mem == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno));
	/* The first page is a header with content; nothing was recorded in the others. */
	must_be_zero(mem + PAGE, data);
	munmap(mem, PAGE + data);
	return pages_of(data);
}

static long run_io_uring(const struct kind *kind KZ_MAYBE_UNUSED)
{
#ifdef SYS_io_uring_setup
	struct io_uring_params params = { 0 };
	unsigned int entries = 64U << between(0, 5);
	int fd = (int)syscall(SYS_io_uring_setup, entries, &params);
	size_t bytes;
	unsigned char *mem;

	if (fd < 0)
		return cannot("io_uring_setup: %s", strerror(errno));
	bytes = params.sq_entries * sizeof(struct io_uring_sqe);
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
		   (off_t)IORING_OFF_SQES);
	close(fd);
	if (mem == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno));
	must_be_zero(mem, bytes);
	munmap(mem, bytes);
	return pages_of(bytes);
#else
	return cannot("the C library does not know io_uring_setup");
#endif
}

static long run_aio_ring(const struct kind *kind KZ_MAYBE_UNUSED)
{
	/* The ring's header, as the kernel lays it out for user space. */
	struct ring { unsigned int id, nr, head, tail, magic, compat, incompat, header; } *ring;
	aio_context_t context = 0;
	size_t bytes;

	if (syscall(SYS_io_setup, (unsigned int)between(1, 2000), &context))
		return cannot("io_setup: %s", strerror(errno));
	ring = (struct ring *)(uintptr_t)context;
	bytes = ring->nr * sizeof(struct io_event);
	must_be_zero((unsigned char *)ring + ring->header, bytes);
	syscall(SYS_io_destroy, context);
	return pages_of(bytes);
}

static long run_packet_ring(const struct kind *kind KZ_MAYBE_UNUSED)
{
	struct tpacket_req request = {
		.tp_block_size = (unsigned int)(PAGE << between(0, 4)),
		.tp_block_nr = (unsigned int)between(1, 16),
		.tp_frame_size = 2048,
	};
	/* Protocol 0: the socket is bound to nothing, no packet is ever written to the ring. */
	int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
	unsigned char *mem;
	size_t bytes = (size_t)request.tp_block_size * request.tp_block_nr;

	if (fd < 0)
		return cannot("socket(AF_PACKET): %s", strerror(errno));
	request.tp_frame_nr = (unsigned int)(bytes / request.tp_frame_size);
	if (setsockopt(fd, SOL_PACKET, PACKET_RX_RING, &request, sizeof(request))) {
		close(fd);
		return cannot("PACKET_RX_RING: %s", strerror(errno));
	}
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mem == MAP_FAILED) {
		close(fd);
		return cannot("mmap: %s", strerror(errno));
	}
	must_be_zero(mem, bytes);
	soil(mem, bytes);
	munmap(mem, bytes);
	close(fd);
	return pages_of(bytes);
}

static int bpf(int command, union bpf_attr *attr)
{
	return (int)syscall(SYS_bpf, command, attr, sizeof(*attr));
}

static long run_bpf_array(const struct kind *kind KZ_MAYBE_UNUSED)
{
	uint32_t entries = (uint32_t)between(1, 64);
	union bpf_attr attr = { 0 };
	unsigned char *mem;
	int fd;

	attr.map_type = BPF_MAP_TYPE_ARRAY;
	attr.key_size = 4;
	attr.value_size = PAGE;
	attr.max_entries = entries;
	attr.map_flags = BPF_F_MMAPABLE;
	fd = bpf(BPF_MAP_CREATE, &attr);
	if (fd < 0)
		return cannot("BPF_MAP_CREATE: %s", strerror(errno));
	mem = mmap(NULL, entries * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (mem == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno));
	must_be_zero(mem, entries * PAGE);
	soil(mem, entries * PAGE);
	munmap(mem, entries * PAGE);
	return (long)entries;
}

static long run_bpf_percpu(const struct kind *kind KZ_MAYBE_UNUSED)
{
	uint32_t entries = (uint32_t)between(1, 64), key;
	unsigned char *buffer = file_buffer();
	union bpf_attr attr = { 0 };
	long pages = 0;
	int fd, cpus = (int)sysconf(_SC_NPROCESSORS_CONF);

	if (cpus > 64)
		return cannot("more than 64 CPUs");
	attr.map_type = BPF_MAP_TYPE_PERCPU_ARRAY;
	attr.key_size = 4;
	attr.value_size = PAGE / 2;
	attr.max_entries = entries;
	fd = bpf(BPF_MAP_CREATE, &attr);
	if (fd < 0)
		return cannot("BPF_MAP_CREATE: %s", strerror(errno));
	for (key = 0; key < entries; key++) {
		file_buffer();
		memset(&attr, 0, sizeof(attr));
		attr.map_fd = (uint32_t)fd;
		attr.key = (uintptr_t)&key;
		attr.value = (uintptr_t)buffer;
		if (bpf(BPF_MAP_LOOKUP_ELEM, &attr)) {
			pages = cannot("BPF_MAP_LOOKUP_ELEM: %s", strerror(errno));
			break;
		}
		must_be_zero(buffer, PAGE / 2 * (size_t)cpus);
		pages += cpus;
	}
	close(fd);
	return pages;
}

static long run_dma_heap(const struct kind *kind KZ_MAYBE_UNUSED)
{
	struct dma_heap_allocation_data data = {
		.len = between(1, 512) * PAGE,
		.fd_flags = O_RDWR | O_CLOEXEC,
	};
	int heap = open("/dev/dma_heap/system", O_RDONLY | O_CLOEXEC);
	unsigned char *mem;

	if (heap < 0)
		return cannot("/dev/dma_heap/system: %s", strerror(errno));
	if (ioctl(heap, DMA_HEAP_IOCTL_ALLOC, &data)) {
		close(heap);
		return cannot("DMA_HEAP_IOCTL_ALLOC: %s", strerror(errno));
	}
	close(heap);
	mem = mmap(NULL, data.len, PROT_READ | PROT_WRITE, MAP_SHARED, (int)data.fd, 0);
	close((int)data.fd);
	if (mem == MAP_FAILED)
		return cannot("mmap: %s", strerror(errno));
	must_be_zero(mem, data.len);
	soil(mem, data.len);
	munmap(mem, data.len);
	return pages_of(data.len);
}

/* --- faults answered in unusual ways --- */

static long run_userfaultfd(const struct kind *kind KZ_MAYBE_UNUSED)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffdio_zeropage zero = { 0 };
	size_t bytes = between(1, 256) * PAGE, i;
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	bool shmem = rng() & 1;
	unsigned char *mem;
	long pages = -1;

	if (fd < 0)
		return cannot("userfaultfd: %s", strerror(errno));
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		   MAP_ANONYMOUS | (shmem ? MAP_SHARED : MAP_PRIVATE), -1, 0);
	if (mem == MAP_FAILED) {
		close(fd);
		return cannot("mmap: %s", strerror(errno));
	}
	reg.range.start = zero.range.start = (uintptr_t)mem;
	reg.range.len = zero.range.len = bytes;
	if (ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &reg)) {
		cannot("UFFDIO_REGISTER: %s", strerror(errno));
	} else if (ioctl(fd, UFFDIO_ZEROPAGE, &zero)) {
		cannot("UFFDIO_ZEROPAGE: %s", strerror(errno));
	} else {
		must_be_zero(mem, bytes);
		for (i = 0; i < bytes; i += PAGE)
			((volatile unsigned char *)mem)[i + rng() % PAGE] = 0;
		must_be_zero(mem, bytes);
		soil(mem, bytes);
		pages = pages_of(bytes);
	}
	close(fd);
	munmap(mem, bytes);
	return pages;
}

static long run_swap(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(16, 512) * PAGE, i;
	unsigned char *mem;
	char text[512];

	if (kz_read_file("/proc/swaps", text, sizeof(text)) < 0 || !strchr(text, '/'))
		return cannot("no swap is in use");
	mem = map_private(bytes, 0);
	if (!mem)
		return -1;
	/* Zero pages and filled pages by turns; each must come back as it went. */
	for (i = 0; i < bytes; i += PAGE)
		memset(mem + i, i / PAGE % 2 ? fill_byte : 0, PAGE);
	if (madvise(mem, bytes, MADV_PAGEOUT)) {
		munmap(mem, bytes);
		return cannot("MADV_PAGEOUT: %s", strerror(errno));
	}
	for (i = 0; i < bytes; i += PAGE) {
		if (i / PAGE % 2 == 0)
			must_be_zero(mem + i, PAGE);
		else if (mem[i] != fill_byte || memcmp(mem + i, mem + i + 1, PAGE - 1))
			leak(mem, i, mem[i]);
	}
	munmap(mem, bytes);
	return pages_of(bytes);
}

static long run_ksm(const struct kind *kind KZ_MAYBE_UNUSED)
{
	size_t bytes = between(16, 256) * PAGE, i;
	unsigned char *mem;

	if (access("/sys/kernel/mm/ksm/run", R_OK))
		return cannot("the kernel has no KSM");
	mem = map_private(bytes, 0);
	if (!mem)
		return -1;
	if (madvise(mem, bytes, MADV_MERGEABLE)) {
		munmap(mem, bytes);
		return cannot("MADV_MERGEABLE: %s", strerror(errno));
	}
	memset(mem, 0, bytes);
	usleep(50000);
	/* Perhaps merged by now; a write takes a copy, of zeros. */
	for (i = 0; i < bytes; i += PAGE)
		((volatile unsigned char *)mem)[i + rng() % PAGE] = 0;
	must_be_zero(mem, bytes);
	soil(mem, bytes);
	munmap(mem, bytes);
	return pages_of(bytes);
}

/* --- the hunt --- */

static void add_kind(const char *name, long (*run)(const struct kind *), unsigned long bytes)
{
	if (nr_kinds == MAX_KINDS)
		kz_die(KZ_BROKEN, "too many kinds");
	snprintf(kinds[nr_kinds].name, sizeof(kinds[0].name), "%s", name);
	kinds[nr_kinds].run = run;
	kinds[nr_kinds].bytes = bytes;
	nr_kinds++;
}

#define THP_DIR "/sys/kernel/mm/transparent_hugepage"

static void add_folio_kinds(void)
{
	char name[24], path[128];
	unsigned long kb;

	for (kb = 8; kb < 2048; kb *= 2) {
		snprintf(path, sizeof(path), THP_DIR "/hugepages-%lukB/enabled", kb);
		if (!access(path, R_OK)) {
			snprintf(name, sizeof(name), "mthp_%luk", kb);
			add_kind(name, run_folio, kb * 1024);
		}
	}
	add_kind("thp", run_folio, KZ_HUGE);
}

static void add_kinds(void)
{
	add_kind("anon_4k", run_anon, 0);
	add_folio_kinds();
	add_kind("brk", run_brk, 0);
	add_kind("stack", run_stack, 0);
	add_kind("bss", run_bss, 0);
	add_kind("fork_cow", run_fork_cow, 0);
	add_kind("dontneed", run_dontneed, 0);
	add_kind("mremap", run_mremap, 0);
	add_kind("mlock", run_locked, 0);
	add_kind("dev_zero", run_dev_zero, 0);
	add_kind("page_tables", run_page_tables, 0);
	add_kind("shmem_write", run_shmem_write, 0);
	add_kind("shmem_fallocate", run_shmem_fallocate, 0);
	add_kind("shmem_mmap", run_shmem_mmap, 0);
	add_kind("shmem_huge", run_shmem_huge, 0);
	add_kind("tmpfs_huge", run_tmpfs_huge, 0);
	add_kind("file_tail", run_file_tail, 0);
	add_kind("splice_tail", run_splice_tail, 0);
	add_kind("sysv_shm", run_sysv_shm, 0);
	add_kind("memfd_secret", run_memfd_secret, 0);
	add_kind("hugetlb_pool", run_hugetlb_pool, 0);
	add_kind("hugetlb_surplus", run_hugetlb_surplus, 0);
	add_kind("hugetlb_memfd", run_hugetlb_memfd, 0);
	add_kind("hugetlb_noreserve", run_hugetlb_noreserve, 0);
	add_kind("hugetlb_grow", run_hugetlb_grow, 0);
	add_kind("hugetlb_file", run_hugetlb_file, 0);
	add_kind("hugetlb_cow", run_hugetlb_cow, 0);
	add_kind("hugetlb_udmabuf", run_hugetlb_udmabuf, 0);
	add_kind("hugetlb_1g", run_hugetlb_1g, 0);
	add_kind("hugetlb_1g_noreserve", run_hugetlb_1g_noreserve, 0);
	add_kind("hugetlb_demote", run_hugetlb_demote, 0);
	add_kind("perf_ring", run_perf_ring, 0);
	add_kind("io_uring", run_io_uring, 0);
	add_kind("aio_ring", run_aio_ring, 0);
	add_kind("packet_ring", run_packet_ring, 0);
	add_kind("bpf_array", run_bpf_array, 0);
	add_kind("bpf_percpu", run_bpf_percpu, 0);
	add_kind("dma_heap", run_dma_heap, 0);
	add_kind("userfaultfd", run_userfaultfd, 0);
	add_kind("swap", run_swap, 0);
	add_kind("ksm", run_ksm, 0);
}

/* A swap device needs a header: its version, its last page and, at the page's end, a name. */
static void swap_on_zram(void)
{
	static unsigned char header[PAGE];
	const unsigned long bytes = 128 * KZ_MB;
	uint32_t *info = (uint32_t *)(void *)(header + 1024);
	char text[32];
	int fd;

	snprintf(text, sizeof(text), "%lu", bytes);
	if (kz_write_file("/sys/block/zram0/disksize", text))
		return;
	info[0] = 1;
	info[1] = (uint32_t)(bytes / PAGE - 1);
	memcpy(header + PAGE - 10, "SWAPSPACE2", 10);
	fd = open("/dev/zram0", O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (write(fd, header, PAGE) == (ssize_t)PAGE && !fsync(fd))
		swapon("/dev/zram0", 0);
	close(fd);
}

/* Switches on what is off by default, so that more kinds can run. Each may fail: it is skipped. */
static void set_up(void)
{
	char path[128];
	unsigned long kb;

	for (kb = 8; kb <= 2048; kb *= 2) {
		snprintf(path, sizeof(path), THP_DIR "/hugepages-%lukB/enabled", kb);
		kz_write_file(path, "madvise");
		snprintf(path, sizeof(path), THP_DIR "/hugepages-%lukB/shmem_enabled", kb);
		kz_write_file(path, "advise");
	}
	kz_write_file(THP_DIR "/enabled", "madvise");
	kz_write_file(THP_DIR "/shmem_enabled", "advise");
	kz_write_file("/proc/sys/vm/nr_hugepages", "8");
	kz_write_file("/proc/sys/vm/nr_overcommit_hugepages", "64");
	kz_write_file("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "1");
	kz_write_file("/sys/kernel/mm/ksm/use_zero_pages", "1");
	kz_write_file("/sys/kernel/mm/ksm/pages_to_scan", "1000");
	kz_write_file("/sys/kernel/mm/ksm/run", "1");
	swap_on_zram();
	if (!mkdir("/tmp/leak_hunter.tmpfs", 0700) || errno == EEXIST)
		if (!mount("none", "/tmp/leak_hunter.tmpfs", "tmpfs", 0, "huge=always,size=128M"))
			tmpfs_dir = "/tmp/leak_hunter.tmpfs";
}

static int nr_workers = 2;
static unsigned long dirty_limit = ULONG_MAX;

static void dirty_free_memory(uint64_t deadline, unsigned long most)
{
	unsigned long room = kz_meminfo("MemAvailable");
	size_t bytes, done;
	unsigned char *mem;

	/* Leave a part for the others, whatever they do. */
	room = room > 128 * KZ_MB ? (room - 128 * KZ_MB) / (unsigned long)nr_workers : 0;
	if (room > most)
		room = most;
	if (room > dirty_limit)
		room = dirty_limit;
	if (room < KZ_HUGE)
		return;
	bytes = between(1, room / KZ_HUGE) * KZ_HUGE;
	mem = map_private(bytes, MAP_NORESERVE);
	if (!mem)
		return;
	madvise(mem, bytes, rng() & 1 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	for (done = 0; done < bytes; done += KZ_HUGE) {
		if (kz_meminfo("MemAvailable") < 96 * KZ_MB || kz_now_ns() > deadline)
			break;
		soil(mem + done, KZ_HUGE);
	}
	munmap(mem, bytes);
	__atomic_add_fetch(&shared->dirtied_bytes, done, __ATOMIC_RELAXED);
}

static void flush_reports(void)
{
	char budget[24];

	snprintf(budget, sizeof(budget), "%lu", between(0, 3) * 512);
	if (!kz_write_file("/sys/module/page_reporting/parameters/flush", budget))
		__atomic_add_fetch(&shared->flushes, 1, __ATOMIC_RELAXED);
}

/*
 * Whose turn it is: every round has each kind once, in an order of its own, so that a short or
 * slow hunt does not leave kinds out by chance. The workers share the rounds.
 */
static int next_kind(void)
{
	uint64_t turn = __atomic_fetch_add(&shared->turns, 1, __ATOMIC_RELAXED);
	uint64_t saved = rng_state;
	int order[MAX_KINDS], i, chosen;

	rng_state = (seed + 1) * 0x94d049bb133111ebULL + turn / (uint64_t)nr_kinds * 0x9e3779b9ULL;
	for (i = 0; i < nr_kinds; i++)
		order[i] = i;
	for (i = nr_kinds - 1; i > 0; i--) {
		int j = (int)between(0, (unsigned long)i), kept = order[i];

		order[i] = order[j];
		order[j] = kept;
	}
	chosen = order[turn % (uint64_t)nr_kinds];
	rng_state = saved;
	return chosen;
}

static bool whole_round;

static bool round_is_over(void)
{
	return __atomic_load_n(&shared->turns, __ATOMIC_RELAXED) >= (uint64_t)nr_kinds;
}

static void worker(int index, uint64_t deadline, int only)
{
	const uint64_t now = kz_now_ns();

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	kz_write_file("/proc/self/oom_score_adj", "500");
	rng_state = (seed + 1) * 0x9e3779b97f4a7c15ULL + (uint64_t)index * 0xbf58476d1ce4e5b9ULL;
	/* On a slow machine this must not take all the time there is. */
	if (now < deadline)
		dirty_free_memory(now + (deadline - now) / 3, ULONG_MAX);
	while (kz_now_ns() < deadline || (whole_round && only < 0 && !round_is_over())) {
		unsigned long dice = between(0, 63);
		struct tally *tally;
		long pages;
		int k;

		if (dice < 4) {
			dirty_free_memory(deadline, 128 * KZ_MB);
			continue;
		}
		if (dice < 6) {
			flush_reports();
			continue;
		}
		k = only >= 0 ? only : next_kind();
		tally = &shared->kind[k];
		current_kind = kinds[k].name;
		pages = kinds[k].run(&kinds[k]);
		if (pages < 0) {
			__atomic_add_fetch(&tally->failed, 1, __ATOMIC_RELAXED);
			memcpy(tally->reason, why, sizeof(why));
		} else {
			__atomic_add_fetch(&tally->pages, (uint64_t)pages, __ATOMIC_RELAXED);
			__atomic_add_fetch(&tally->runs, 1, __ATOMIC_RELAXED);
		}
	}
	_exit(KZ_OK);
}

static pid_t start_worker(int index, uint64_t deadline, int only)
{
	pid_t pid = fork();

	if (pid < 0)
		kz_die(KZ_BROKEN, "fork: %s", strerror(errno));
	if (!pid)
		worker(index, deadline, only);
	return pid;
}

static void print_json_text(const char *text)
{
	putchar('"');
	for (; *text; text++)
		if (*text == '"' || *text == '\\')
			printf("\\%c", *text);
		else if ((unsigned char)*text >= 0x20)
			putchar(*text);
	putchar('"');
}

static uint64_t report(unsigned long seconds, uint64_t began, unsigned long killed,
		       const struct kz_vmstat *before)
{
	static struct kz_vmstat after;
	const char *separator = "";
	uint64_t total = 0;
	int k;

	kz_vmstat_read(&after);
	printf("{\"seconds\": %lu, \"elapsed_ms\": %" PRIu64
	       ", \"seed\": %lu, \"workers\": %d, \"checked_pages\": {",
	       seconds, (kz_now_ns() - began) / 1000000, seed, nr_workers);
	for (k = 0; k < nr_kinds; k++) {
		if (!shared->kind[k].runs)
			continue;
		printf("%s\"%s\": %" PRIu64, separator, kinds[k].name, shared->kind[k].pages);
		separator = ", ";
		total += shared->kind[k].pages;
	}
	printf("}, \"skipped\": {");
	for (k = 0, separator = ""; k < nr_kinds; k++) {
		if (shared->kind[k].runs)
			continue;
		printf("%s\"%s\": ", separator, kinds[k].name);
		print_json_text(shared->kind[k].failed ? shared->kind[k].reason :
				"its turn did not come in the time given");
		separator = ", ";
	}
	printf("}, \"total_pages\": %" PRIu64 ", \"dirtied_bytes\": %" PRIu64
	       ", \"flushes\": %" PRIu64 ", \"workers_killed\": %lu, \"violations\": %" PRIu64 ", ",
	       total, shared->dirtied_bytes, shared->flushes, killed, shared->violations);
	kz_vmstat_print_delta(before, &after);
	printf("}\n");
	fflush(stdout);
	return total;
}

static void usage(FILE *out)
{
	fprintf(out,
"usage: leak_hunter [options]\n"
"Dirties free memory and reads new memory of every kind as zero; prints one JSON line.\n"
"  --seconds S      how long (default 10)\n"
"  --whole-round    go on until every kind had its turn, however long that takes\n"
"  --seed N         the random choices (default 1)\n"
"  --workers N      processes, 1 to 16 (default 2)\n"
"  --byte VALUE     what free memory is dirtied with, 1 to 255 (default 0x5a)\n"
"  --dirty MB       dirty at most so much at once in each process (default: what is free)\n"
"  --kind NAME      this kind alone (--list names them)\n"
"  --setup          change the system so that more kinds run: huge page settings, KSM, swap\n"
"                   on zram, a tmpfs; for throwaway guests\n"
"  --plant          put a byte that is not zero where it looks: it must fail\n"
"  --list           name the kinds and end\n"
"  --help           this text\n"
"Exit: 0 all zero, 1 a byte was not zero or a worker crashed, 2 bad usage, 3 nothing checked.\n");
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "seconds", required_argument, NULL, 's' },
		{ "whole-round", no_argument, NULL, 'W' },
		{ "seed", required_argument, NULL, 'e' },
		{ "workers", required_argument, NULL, 'w' },
		{ "byte", required_argument, NULL, 'b' },
		{ "dirty", required_argument, NULL, 'd' },
		{ "kind", required_argument, NULL, 'k' },
		{ "setup", no_argument, NULL, 'u' },
		{ "plant", no_argument, NULL, 'p' },
		{ "list", no_argument, NULL, 'l' },
		{ "check-bss", required_argument, NULL, 'c' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	static struct kz_vmstat before;
	unsigned long seconds = 10, killed = 0;
	const char *only_name = NULL;
	pid_t pids[MAX_WORKERS] = { 0 };
	bool setup = false, failed = false;
	int opt, i, only = -1, running;
	uint64_t began, deadline;

	kz_program = "leak_hunter";
	seed = 1;
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 's':
			seconds = kz_number("--seconds", optarg, 1, 1000000);
			break;
		case 'W':
			whole_round = true;
			break;
		case 'e':
			seed = kz_number("--seed", optarg, 0, ULONG_MAX - 1);
			break;
		case 'w':
			nr_workers = (int)kz_number("--workers", optarg, 1, MAX_WORKERS);
			break;
		case 'b':
			fill_byte = (unsigned char)kz_number("--byte", optarg, 1, 255);
			break;
		case 'd':
			dirty_limit = kz_number("--dirty", optarg, 0, 1UL << 20) * KZ_MB;
			break;
		case 'k':
			only_name = optarg;
			break;
		case 'u':
			setup = true;
			break;
		case 'p':
			plant = true;
			break;
		case 'l':
			add_kinds();
			for (i = 0; i < nr_kinds; i++)
				puts(kinds[i].name);
			return KZ_OK;
		case 'c':
			i = (int)kz_first_nonzero(bss_area, sizeof(bss_area));
			if ((size_t)i < sizeof(bss_area)) {
				printf("{\"violation\": {\"kind\": \"bss\", \"offset\": %d, "
				       "\"value\": %u, \"seed\": %s}}\n", i, bss_area[i], optarg);
				return KZ_FAILED;
			}
			return KZ_OK;
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
	add_kinds();
	if (only_name) {
		for (only = 0; only < nr_kinds; only++)
			if (!strcmp(kinds[only].name, only_name))
				break;
		if (only == nr_kinds)
			kz_die(KZ_USAGE, "--kind: '%s' is unknown; see --list", only_name);
	}
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		      -1, 0);
	if (shared == MAP_FAILED)
		kz_die(KZ_BROKEN, "mmap: %s", strerror(errno));
	throwaway = setup;
	if (setup)
		set_up();

	kz_vmstat_read(&before);
	began = kz_now_ns();
	deadline = began + seconds * 1000000000ULL;
	for (i = 0; i < nr_workers; i++)
		pids[i] = start_worker(i, deadline, only);
	running = nr_workers;
	while (running) {
		int status, index;
		pid_t pid = wait(&status);

		if (pid < 0 && errno == EINTR)
			continue;
		if (pid < 0)
			kz_die(KZ_BROKEN, "wait: %s", strerror(errno));
		for (index = 0; index < nr_workers && pids[index] != pid; index++)
			;
		if (index == nr_workers)
			continue;
		pids[index] = 0;
		if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
			/* Out of memory: another one takes its place. */
			killed++;
			if (kz_now_ns() < deadline || (whole_round && only < 0 && !round_is_over())) {
				pids[index] = start_worker(index + (int)killed * nr_workers,
							   deadline, only);
				continue;
			}
		} else if (WIFSIGNALED(status)) {
			fprintf(stderr, "leak_hunter: a worker died of signal %d\n",
				WTERMSIG(status));
			failed = true;
		} else if (WEXITSTATUS(status)) {
			failed = true;
		}
		running--;
		/* The first failure ends the hunt, with the evidence still fresh. */
		if (failed)
			for (i = 0; i < nr_workers; i++)
				if (pids[i])
					kill(pids[i], SIGKILL);
		if (failed)
			deadline = 0;
	}
	if (!report(seconds, began, killed, &before) && !failed)
		kz_die(KZ_BROKEN, "nothing was checked");
	if (setup && tmpfs_dir)
		umount(tmpfs_dir);
	return failed || shared->violations ? KZ_FAILED : KZ_OK;
}
