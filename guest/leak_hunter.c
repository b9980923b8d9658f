// SPDX-License-Identifier: GPL-2.0
/*
 * leak_hunter: dirties free memory, allocates every kind of memory that a program can get, and reads
 * each byte that must be zero. Another value is a leak: the program prints it and fails. It lists a
 * kind of memory that this kernel does not offer with the reason, and does not count it.
 */
#include "common.h"

#include <linux/aio_abi.h>
#include <linux/bpf.h>
#include <linux/dma-heap.h>
#include <linux/if_packet.h>
#include <linux/io_uring.h>
#include <linux/magic.h>
#include <linux/perf_event.h>
#include <linux/udmabuf.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#define PAGE 4096UL
#define MAX_KINDS 64
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define THP_DIR "/sys/kernel/mm/transparent_hugepage"

/* Shared by the workers and the parent. */
static struct shared {
	struct {
		uint64_t pages, runs, failed;
		char reason[120];
	} kind[MAX_KINDS];
	uint64_t dirtied_bytes, flushes, violations, turns;
	volatile uint64_t deadline;	/* 0 ends the hunt at once */
} *shared;

/*
 * A kind of memory. A check returns the number of pages, or -1 with the reason in why. run_map
 * maps low to high units of anonymous memory, or of a new file in memory if memfd is not 0.
 */
typedef long check_fn(unsigned char *mem, size_t bytes);

struct kind {
	char name[24];
	long (*run)(void);
	unsigned long low, high, unit;
	int flags;
	check_fn *check;
	unsigned int memfd;
};

static struct kind kinds[MAX_KINDS], *current;
static int nr_kinds;

static unsigned long seed = 1, fill = 0x5a, nr_workers = 2, dirty_limit = ULONG_MAX / KZ_MB;
static char why[120];
/* --plant: proves that the hunter finds a byte that is not zero. --setup: the guest may be changed. */
static bool plant, throwaway, whole_round;
static int only = -1;

static __attribute__((format(printf, 1, 2))) long cannot(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	return -1;
}

static long failed(const char *call)
{
	return cannot("%s: %s", call, strerror(errno));
}

#define FAIL_IF(condition, call) \
	do { if (condition) return failed(call); } while (0)

static unsigned long pages_between(unsigned long low, unsigned long high)
{
	return kz_between(low, high) * PAGE;
}

static long pages_of(size_t bytes)
{
	return (long)((bytes + PAGE - 1) / PAGE);
}

/* Checks */

static __attribute__((noreturn)) void leak(const void *at, size_t offset, unsigned char value)
{
	__atomic_add_fetch(&shared->violations, 1, __ATOMIC_RELAXED);
	dprintf(STDOUT_FILENO, "{\"violation\": {\"kind\": \"%s\", \"address\": \"%p\", "
		"\"offset\": %zu, \"page_offset\": %lu, \"value\": %u, \"pid\": %d, \"seed\": %lu}}\n",
		current->name, at, offset, ((uintptr_t)at + offset) % PAGE, value, (int)getpid(), seed);
	_exit(KZ_FAILED);
}

static long must_be_zero(unsigned char *mem, size_t bytes)
{
	size_t bad;

	if (plant && bytes)
		((volatile unsigned char *)mem)[bytes - 1] = (unsigned char)fill;
	bad = kz_first_nonzero(mem, bytes);
	if (bad < bytes)
		leak(mem, bad, mem[bad]);
	return pages_of(bytes);
}

static void soil(void *mem, size_t bytes)
{
	memset(mem, (int)fill, bytes);
}

/* Writes a zero to a random byte of each page. */
static void touch(unsigned char *mem, size_t bytes)
{
	size_t i;

	for (i = 0; i < bytes; i += PAGE)
		((volatile unsigned char *)mem)[i + kz_rng() % PAGE] = 0;
}

/* Ways to check a mapping: this one does not touch it before it reads it. */
static long check_present(unsigned char *mem, size_t bytes)
{
	long pages = must_be_zero(mem, bytes);

	soil(mem, bytes);
	return pages;
}

static long check_touched(unsigned char *mem, size_t bytes)
{
	touch(mem, bytes);
	return check_present(mem, bytes);
}

/* A fault in a hugetlb mapping whose pool shrank raises SIGBUS; populating it fails instead. */
static long check_populated(unsigned char *mem, size_t bytes)
{
	FAIL_IF(madvise(mem, bytes, MADV_POPULATE_WRITE), "cannot populate");
	return check_present(mem, bytes);
}

static long check_fresh(unsigned char *mem, size_t bytes)
{
	return kz_rng() & 1 ? check_populated(mem, bytes) : check_touched(mem, bytes);
}

static long check_small(unsigned char *mem, size_t bytes)
{
	madvise(mem, bytes, MADV_NOHUGEPAGE);
	return check_fresh(mem, bytes);
}

static long check_map_at(int fd, off_t offset, size_t bytes, int flags, check_fn *check)
{
	unsigned char *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, offset);
	long pages;

	FAIL_IF(mem == MAP_FAILED, "mmap");
	pages = check(mem, bytes);
	munmap(mem, bytes);
	return pages;
}

static long check_map(int fd, size_t bytes, int flags, check_fn *check)
{
	return check_map_at(fd, 0, bytes, flags, check);
}

/* Takes a descriptor that was just opened and checks a shared mapping of it. */
static long check_file(int opened, const char *what, size_t bytes, check_fn *check)
{
	KZ_FD fd = opened;

	return fd < 0 ? failed(what) : check_map(fd, bytes, MAP_SHARED, check);
}

/* A file in memory of @bytes, allocated with fallocate(2) if @allocate; -1 on failure. */
static int new_memfd(unsigned int flags, size_t bytes, bool allocate)
{
	int fd = memfd_create("leak_hunter", MFD_CLOEXEC | flags);

	if (fd < 0)
		return (int)failed("memfd_create");
	if (allocate ? !fallocate(fd, 0, 0, (off_t)bytes) : !ftruncate(fd, (off_t)bytes))
		return fd;
	failed(allocate ? "fallocate" : "ftruncate");
	close(fd);
	return -1;
}

static int mapped_fd;

static long run_map(void)
{
	const size_t bytes = kz_between(current->low, current->high) * current->unit;
	int flags = current->flags;
	KZ_FD fd = -1;

	if (current->memfd) {
		fd = new_memfd(current->memfd, bytes, current->memfd & MFD_HUGETLB);
		if (fd < 0)
			return -1;
	} else if (!flags) {
		flags = MAP_ANONYMOUS | (kz_rng() & 1 ? MAP_SHARED : MAP_PRIVATE);
	} else if (current->check == check_small && !(kz_rng() % 4)) {
		flags |= MAP_POPULATE;
	}
	mapped_fd = fd;
	return check_map(fd, bytes, flags, current->check);
}

/* Results of the children of this worker. */
static struct {
	long pages;
	char why[sizeof(why)];
} *answer;

/* Runs body in a child, so that what it grows, limits or breaks ends with it. */
static long in_child(long (*body)(void))
{
	pid_t pid;
	int status;

	answer->pages = cannot("the child ended early");
	memcpy(answer->why, why, sizeof(why));
	pid = fork();
	FAIL_IF(pid < 0, "fork");
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		kz_rng_state = kz_mix(kz_rng_state);
		answer->pages = body();
		memcpy(answer->why, why, sizeof(why));
		_exit(KZ_OK);
	}
	status = kz_wait(pid, NULL);
	if (WIFEXITED(status) && WEXITSTATUS(status) == KZ_FAILED)
		_exit(KZ_FAILED);
	/* SIGKILL means that memory ran out; any other signal is a kernel fault. */
	if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
		raise(WTERMSIG(status));
	memcpy(why, answer->why, sizeof(why));
	return answer->pages;
}

/* Anonymous memory */

/* Folios of one size: mappings aligned to it, with no neighbour to merge with. */
static long run_folio(void)
{
	const size_t bytes = current->unit, total = 3 * bytes;
	long pages = 0, got;
	int n = (int)kz_between(1, bytes >= KZ_HUGE ? 8 : 32);

	while (n--) {
		unsigned char *base = mmap(NULL, total, PROT_NONE, ANON | MAP_NORESERVE, -1, 0), *mem;

		FAIL_IF(base == MAP_FAILED, "mmap");
		mem = (unsigned char *)(((uintptr_t)base + bytes) & ~(bytes - 1));
		if (mprotect(mem, bytes, PROT_READ | PROT_WRITE)) {
			got = failed("mprotect");
		} else {
			madvise(mem, bytes, MADV_HUGEPAGE);
			got = check_fresh(mem, bytes);
		}
		munmap(base, total);
		if (got < 0)
			return -1;
		pages += got;
	}
	return pages;
}

static long run_brk(void)
{
	size_t bytes = pages_between(1, 1024), pad = (PAGE - (uintptr_t)sbrk(0) % PAGE) % PAGE;
	unsigned char *mem = sbrk((intptr_t)(bytes + pad));
	long pages;

	FAIL_IF(mem == (void *)-1, "sbrk");
	pages = check_fresh(mem + pad, bytes);
	FAIL_IF(sbrk(-(intptr_t)(bytes + pad)) == (void *)-1, "sbrk back");
	return pages;
}

static long stack_body(void)
{
	size_t pages = kz_between(1, 512), i;
	unsigned char *top = NULL;
	char line[256];
	FILE *f = fopen("/proc/self/maps", "re");

	/* The stack grows below the start of its mapping. */
	while (f && fgets(line, sizeof(line), f))
		if (strstr(line, "[stack]"))
			top = (unsigned char *)strtoul(line, NULL, 16);
	if (f)
		fclose(f);
	if (!top)
		return cannot("no [stack] in /proc/self/maps");
	for (i = 1; i <= pages; i++)
		((volatile unsigned char *)top)[kz_rng() % PAGE - i * PAGE] = 0;
	return must_be_zero(top - pages * PAGE, pages * PAGE);
}

static long run_stack(void)
{
	return in_child(stack_body);
}

static unsigned char *cow_mem;
static size_t cow_bytes;

static long cow_body(void)
{
	return check_touched(cow_mem, cow_bytes);
}

static long copy_in_child(unsigned char *mem, size_t bytes, long (*body)(void))
{
	cow_mem = mem;
	cow_bytes = bytes;
	return in_child(body);
}

static long check_fork_cow(unsigned char *mem, size_t bytes)
{
	long pages;
	size_t i;

	/* Read first: the child copies the shared zero page. */
	for (i = 0; i < bytes; i += PAGE)
		if (((volatile unsigned char *)mem)[i])
			leak(mem, i, mem[i]);
	pages = copy_in_child(mem, bytes, cow_body);
	must_be_zero(mem, bytes);
	return pages;
}

static long check_dontneed(unsigned char *mem, size_t bytes)
{
	madvise(mem, bytes, kz_rng() & 1 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	soil(mem, bytes);
	madvise(mem, bytes, MADV_DONTNEED);
	return check_fresh(mem, bytes);
}

static long run_mremap(void)
{
	size_t old = pages_between(1, 64), grown = old + pages_between(1, 512);
	unsigned char *mem = mmap(NULL, old, PROT_READ | PROT_WRITE, ANON, -1, 0), *moved;
	long pages, more;

	FAIL_IF(mem == MAP_FAILED, "mmap");
	soil(mem, old);
	moved = mremap(mem, old, grown, MREMAP_MAYMOVE);
	if (moved == MAP_FAILED) {
		munmap(mem, old);
		return failed("mremap");
	}
	pages = check_fresh(moved + old, grown - old);
	mem = mremap(moved, grown, grown, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
	if (mem != MAP_FAILED) {
		/* The pages moved away: their old place is empty again. */
		more = check_fresh(moved, grown);
		if (pages >= 0 && more > 0)
			pages += more;
		munmap(mem, grown);
	}
	munmap(moved, grown);
	return pages;
}

static long check_locked(unsigned char *mem, size_t bytes)
{
	return mlock(mem, bytes) ? failed("mlock") : check_present(mem, bytes);
}

static long run_dev_zero(void)
{
	size_t bytes = pages_between(1, 512);
	KZ_FD fd = open("/dev/zero", O_RDWR | O_CLOEXEC);

	FAIL_IF(fd < 0, "/dev/zero");
	return check_map(fd, bytes, kz_rng() & 1 ? MAP_SHARED : MAP_PRIVATE, check_fresh);
}

/* A mebibyte of bss: its pages, and the tail of the page that it shares with data, start as zero. */
static unsigned char bss_area[KZ_MB];

static int check_bss(const char *of_seed)
{
	size_t bad = kz_first_nonzero(bss_area, sizeof(bss_area));

	if (bad == sizeof(bss_area))
		return KZ_OK;
	printf("{\"violation\": {\"kind\": \"bss\", \"offset\": %zu, \"value\": %u, \"seed\": %s}}\n",
	       bad, bss_area[bad], of_seed);
	return KZ_FAILED;
}

static long bss_body(void)
{
	char text[32];

	snprintf(text, sizeof(text), "%lu", seed);
	answer->pages = pages_of(sizeof(bss_area));
	execl("/proc/self/exe", "leak_hunter", "--check-bss", text, (char *)NULL);
	return failed("exec");
}

/* The executed program cannot count its violation, so that is counted before it runs. */
static long run_bss(void)
{
	long pages;

	__atomic_add_fetch(&shared->violations, 1, __ATOMIC_RELAXED);
	pages = in_child(bss_body);
	__atomic_sub_fetch(&shared->violations, 1, __ATOMIC_RELAXED);
	return pages;
}

/* Page tables cannot be read, but an entry that is not zero shows as present in pagemap. */
static long check_tables(unsigned char *mem, size_t bytes)
{
	uint64_t entries[512];
	size_t at;
	KZ_FD fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	FAIL_IF(fd < 0, "/proc/self/pagemap");
	madvise(mem, bytes, MADV_NOHUGEPAGE);
	for (at = 0; at < bytes; at += KZ_HUGE)
		((volatile unsigned char *)mem)[at + PAGE * (kz_rng() % 512)] = 1;
	for (at = 0; at < bytes; at += KZ_HUGE) {
		int i, present = 0;

		if (pread(fd, entries, sizeof(entries), (off_t)((uintptr_t)(mem + at) / PAGE * 8)) !=
		    (ssize_t)sizeof(entries))
			return cannot("short read of pagemap");
		for (i = 0; i < 512; i++)
			present += !!(entries[i] >> 62);
		/* One page was touched; further entries are content that the table had before. */
		if (present != 1)
			leak(mem + at, 0, (unsigned char)present);
	}
	return (long)(bytes / KZ_HUGE);
}

/* Files in memory */

/* Reads a file back: all of it but [skip_from, skip_to) must be zero. */
static long file_is_zero(int fd, size_t bytes, size_t skip_from, size_t skip_to)
{
	static unsigned char buffer[64 * PAGE];
	size_t at, i;

	for (at = 0; at < bytes; at += sizeof(buffer)) {
		size_t part = bytes - at < sizeof(buffer) ? bytes - at : sizeof(buffer);

		memset(buffer, 0xee, sizeof(buffer));
		FAIL_IF(pread(fd, buffer, part, (off_t)at) != (ssize_t)part, "pread");
		for (i = skip_from; i < skip_to; i++)
			if (i >= at && i < at + part)
				buffer[i - at] = 0;
		must_be_zero(buffer, part);
	}
	return pages_of(bytes);
}

static long short_write(int fd, size_t bytes)
{
	size_t at = kz_between(0, bytes - 64);

	FAIL_IF(pwrite(fd, "hunter", 6, (off_t)at) != 6, "write");
	return file_is_zero(fd, bytes, at, at + 6);
}

/* A short write into a new page; the rest of that page and of the file is a hole. */
static long run_shmem_write(void)
{
	size_t bytes = pages_between(1, 64);
	KZ_FD fd = new_memfd(0, bytes, false);

	return fd < 0 ? -1 : short_write(fd, bytes);
}

/* Allocated and not up to date: neither a read nor a short write may reveal the content. */
static long run_shmem_fallocate(void)
{
	size_t bytes = pages_between(1, 64);
	KZ_FD fd = new_memfd(0, bytes, true);

	if (fd < 0)
		return -1;
	return kz_rng() & 1 ? file_is_zero(fd, bytes, bytes, bytes) : short_write(fd, bytes);
}

/* Punches the file out below its mapping, which must then be zero again. */
static long check_punched(unsigned char *mem, size_t bytes)
{
	long pages, again;

	madvise(mem, bytes, current->unit == PAGE ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
	pages = check_fresh(mem, bytes);
	if (pages < 0 || fallocate(mapped_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes))
		return pages;
	again = check_fresh(mem, bytes);
	return again < 0 ? again : pages + again;
}

static const char tmpfs_dir[] = "/tmp/leak_hunter.tmpfs";	/* huge=always, with --setup */

static long run_tmpfs_huge(void)
{
	size_t bytes = kz_between(1, 4) * KZ_HUGE, at = kz_between(0, bytes / PAGE - 1) * PAGE;
	KZ_FD fd = open(tmpfs_dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

	FAIL_IF(fd < 0, tmpfs_dir);
	FAIL_IF(pwrite(fd, "hunter", 6, (off_t)at) != 6 || ftruncate(fd, (off_t)bytes), "write");
	return file_is_zero(fd, bytes, at, at + 6);
}

static const unsigned char *junk(void)
{
	static unsigned char page[PAGE];

	return memset(page, 0xee, sizeof(page));
}

static size_t file_used;

/* Beyond the end of the file: first in the page cache, then in the private copy. */
static long check_tail(unsigned char *mem, size_t bytes)
{
	must_be_zero(mem + file_used, bytes - file_used);
	((volatile unsigned char *)mem)[0] = 1;
	must_be_zero(mem + file_used, bytes - file_used);
	return 2;
}

static long run_file_tail(void)
{
	KZ_FD fd = new_memfd(0, 0, false);

	file_used = kz_between(1, PAGE - 1);
	if (fd < 0)
		return -1;
	FAIL_IF(pwrite(fd, junk(), file_used, 0) != (ssize_t)file_used, "write");
	return check_map(fd, PAGE, MAP_PRIVATE, check_tail);
}

/* Socket buffer, pipe page, file page; the file then grows to a whole page. */
static long run_splice_tail(void)
{
	const size_t used = kz_between(1, PAGE - 1);
	int pipefd[2], sock[2];
	KZ_FD fd = new_memfd(0, 0, false);

	if (fd < 0)
		return -1;
	FAIL_IF(pipe2(pipefd, O_CLOEXEC), "pipe");
	KZ_FD from = pipefd[0], to = pipefd[1];

	/* A kernel without sockets starts at the pipe. */
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sock)) {
		FAIL_IF(write(to, junk(), used) != (ssize_t)used, "pipe write");
	} else {
		KZ_FD near = sock[0], far = sock[1];

		FAIL_IF(send(near, junk(), used, 0) != (ssize_t)used, "send");
		FAIL_IF(splice(far, NULL, to, NULL, used, 0) != (ssize_t)used, "splice from a socket");
	}
	FAIL_IF(splice(from, NULL, fd, NULL, used, 0) != (ssize_t)used, "splice to a file");
	FAIL_IF(ftruncate(fd, PAGE), "ftruncate");
	return file_is_zero(fd, PAGE, 0, used);
}

static long run_sysv_shm(void)
{
	size_t bytes = pages_between(1, 256);
	int id = shmget(IPC_PRIVATE, bytes, IPC_CREAT | 0600);
	unsigned char *mem;
	long pages;

	FAIL_IF(id < 0, "shmget");
	mem = shmat(id, NULL, 0);
	shmctl(id, IPC_RMID, NULL);
	FAIL_IF(mem == (void *)-1, "shmat");
	pages = check_fresh(mem, bytes);
	shmdt(mem);
	return pages;
}

static long run_memfd_secret(void)
{
	size_t bytes = pages_between(1, 64);
	int fd = (int)syscall(SYS_memfd_secret, O_CLOEXEC);

	FAIL_IF(fd >= 0 && ftruncate(fd, (off_t)bytes), "ftruncate");
	return check_file(fd, "memfd_secret", bytes, check_touched);
}

/* hugetlb */

#define HUGETLB (ANON | MAP_HUGETLB)
#define HUGE_1G (30 << 26)

#define POOL "/proc/sys/vm/nr_hugepages"
#define POOL_1G "/sys/kernel/mm/hugepages/hugepages-1048576kB/"

static long pool_size(const char *path)
{
	char text[32];

	return kz_read_file(path, text, sizeof(text)) < 0 ? -1 : atol(text);
}

/* Changes the size of a pool; returns by how much it has grown, which may be less. */
static long resize_pool(const char *path, long by)
{
	long before = pool_size(path);
	char text[32];

	if (before < 0 || !throwaway)
		return 0;
	snprintf(text, sizeof(text), "%ld", before + by < 0 ? 0 : before + by);
	return kz_write_file(path, text) ? 0 : pool_size(path) - before;
}

static long run_hugetlb_grow(void)
{
	long grown = resize_pool(POOL, (long)kz_between(1, 16)), pages;

	if (grown <= 0)
		return cannot("the pool of huge pages does not grow, or may not (--setup)");
	pages = check_map(-1, (size_t)grown * KZ_HUGE, HUGETLB, check_populated);
	resize_pool(POOL, -grown);
	return pages;
}

/* Parts of a former page of 1 GiB. */
static long run_hugetlb_demote(void)
{
	long before = pool_size(POOL), pages;

	if (!throwaway)
		return cannot("pools are changed only with --setup");
	if (pool_size(POOL_1G "nr_hugepages") < 1 && resize_pool(POOL_1G "nr_hugepages", 1) < 1)
		return cannot("there is no page of 1 GiB");
	FAIL_IF(kz_write_file(POOL_1G "demote", "1"), "cannot demote");
	pages = check_map(-1, kz_between(64, 256) * KZ_HUGE, HUGETLB, check_populated);
	resize_pool(POOL, before - pool_size(POOL));
	return pages;
}

static long run_hugetlb_file(void)
{
	size_t bytes = kz_between(1, 4) * KZ_HUGE;
	char path[] = "/dev/hugepages/hunter.XXXXXX";
	struct statfs fs = { 0 };
	KZ_FD fd = mkstemp(path);

	FAIL_IF(fd < 0, path);
	unlink(path);
	/* Without hugetlbfs it is an ordinary folder. */
	if (fstatfs(fd, &fs) || (unsigned long)fs.f_type != HUGETLBFS_MAGIC)
		return cannot("%s: not on hugetlbfs", path);
	FAIL_IF(ftruncate(fd, (off_t)bytes), "ftruncate");
	FAIL_IF(kz_rng() & 1 && fallocate(fd, 0, (off_t)(bytes - KZ_HUGE), (off_t)KZ_HUGE), "fallocate");
	return check_map(fd, bytes, kz_rng() & 1 ? MAP_SHARED : MAP_PRIVATE, check_populated);
}

/* A copied huge page has the content of the original, even if the new page is known zero. */
static long hugetlb_cow_body(void)
{
	size_t i;

	FAIL_IF(madvise(cow_mem, cow_bytes, MADV_POPULATE_WRITE), "cannot populate the copy");
	for (i = 0; i < cow_bytes; i++)
		if (cow_mem[i] != fill)
			leak(cow_mem, i, cow_mem[i]);
	return pages_of(cow_bytes);
}

static long check_hugetlb_cow(unsigned char *mem, size_t bytes)
{
	return check_populated(mem, bytes) < 0 ? -1 : copy_in_child(mem, bytes, hugetlb_cow_body);
}

/* A file of huge pages that a driver pins before any program touches it. */
static long run_hugetlb_udmabuf(void)
{
	size_t bytes = kz_between(1, 4) * KZ_HUGE;
	struct udmabuf_create create = { .flags = UDMABUF_FLAGS_CLOEXEC, .size = bytes };
	KZ_FD fd = new_memfd(MFD_HUGETLB | MFD_ALLOW_SEALING, bytes, false);
	KZ_FD dev = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return -1;
	FAIL_IF(dev < 0, "/dev/udmabuf");
	FAIL_IF(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), "seal");
	create.memfd = (uint32_t)fd;
	KZ_FD buf = ioctl(dev, UDMABUF_CREATE, &create);

	FAIL_IF(buf < 0, "UDMABUF_CREATE");
	return check_map(fd, bytes, MAP_SHARED, check_populated);
}

/* Memory that the kernel allocates for itself and maps into the program */

/* The first page is a header with content; the others have no record yet. */
static long check_after_header(unsigned char *mem, size_t bytes)
{
	return must_be_zero(mem + PAGE, bytes - PAGE);
}

static long run_perf_ring(void)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE, .size = sizeof(attr), .config = PERF_COUNT_SW_DUMMY,
		.disabled = 1,
	};
	size_t data = PAGE << kz_between(0, 6);

	return check_file((int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC),
			  "perf_event_open", PAGE + data, check_after_header);
}

static long run_io_uring(void)
{
	struct io_uring_params params = { 0 };
	KZ_FD fd = (int)syscall(SYS_io_uring_setup, 64U << kz_between(0, 5), &params);

	FAIL_IF(fd < 0, "io_uring_setup");
	return check_map_at(fd, (off_t)IORING_OFF_SQES, params.sq_entries * sizeof(struct io_uring_sqe),
			    MAP_SHARED | MAP_POPULATE, must_be_zero);
}

static long run_aio_ring(void)
{
	/* The ring's header, as the kernel lays it out for user space. */
	struct ring { unsigned int id, nr, head, tail, magic, compat, incompat, header; } *ring;
	aio_context_t context = 0;
	long pages;

	FAIL_IF(syscall(SYS_io_setup, (unsigned int)kz_between(1, 2000), &context), "io_setup");
	ring = (struct ring *)(uintptr_t)context;
	pages = must_be_zero((unsigned char *)ring + ring->header, ring->nr * sizeof(struct io_event));
	syscall(SYS_io_destroy, context);
	return pages;
}

static long run_packet_ring(void)
{
	const size_t block = PAGE << kz_between(0, 4), blocks = kz_between(1, 16), bytes = block * blocks;
	struct tpacket_req request = {
		(unsigned int)block, (unsigned int)blocks, 2048, (unsigned int)(bytes / 2048),
	};
	/* Protocol 0: the socket is bound to nothing, no packet is ever written to the ring. */
	KZ_FD fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);

	FAIL_IF(fd < 0, "socket(AF_PACKET)");
	FAIL_IF(setsockopt(fd, SOL_PACKET, PACKET_RX_RING, &request, sizeof(request)), "PACKET_RX_RING");
	return check_map(fd, bytes, MAP_SHARED, check_present);
}

static int bpf_array(uint32_t type, uint32_t value_size, uint32_t entries, uint32_t flags)
{
	union bpf_attr attr = {
		.map_type = type, .key_size = 4, .value_size = value_size,
		.max_entries = entries, .map_flags = flags,
	};

	return (int)syscall(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof(attr));
}

static long run_bpf_array(void)
{
	uint32_t entries = (uint32_t)kz_between(1, 64);

	return check_file(bpf_array(BPF_MAP_TYPE_ARRAY, PAGE, entries, BPF_F_MMAPABLE),
			  "BPF_MAP_CREATE", entries * PAGE, check_present);
}

static long run_bpf_percpu(void)
{
	static unsigned char buffer[32 * PAGE];
	uint32_t entries = (uint32_t)kz_between(1, 64), key;
	long cpus = sysconf(_SC_NPROCESSORS_CONF);
	KZ_FD fd = bpf_array(BPF_MAP_TYPE_PERCPU_ARRAY, PAGE / 2, entries, 0);

	FAIL_IF(fd < 0, "BPF_MAP_CREATE");
	if (cpus > 64)
		return cannot("more than 64 CPUs");
	for (key = 0; key < entries; key++) {
		union bpf_attr attr = {
			.map_fd = (uint32_t)fd, .key = (uintptr_t)&key, .value = (uintptr_t)buffer,
		};

		memset(buffer, 0xee, sizeof(buffer));
		FAIL_IF(syscall(SYS_bpf, BPF_MAP_LOOKUP_ELEM, &attr, sizeof(attr)), "BPF_MAP_LOOKUP_ELEM");
		must_be_zero(buffer, PAGE / 2 * (size_t)cpus);
	}
	return entries * cpus;
}

static long run_dma_heap(void)
{
	struct dma_heap_allocation_data data = { .len = pages_between(1, 512), .fd_flags = O_RDWR | O_CLOEXEC };
	KZ_FD heap = open("/dev/dma_heap/system", O_RDONLY | O_CLOEXEC);

	FAIL_IF(heap < 0, "/dev/dma_heap/system");
	FAIL_IF(ioctl(heap, DMA_HEAP_IOCTL_ALLOC, &data), "DMA_HEAP_IOCTL_ALLOC");
	return check_file((int)data.fd, "DMA_HEAP_IOCTL_ALLOC", data.len, check_present);
}

/* Faults that are answered in unusual ways */

static long check_zeropage(unsigned char *mem, size_t bytes)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffdio_zeropage zero = { 0 };
	KZ_FD fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	FAIL_IF(fd < 0, "userfaultfd");
	reg.range.start = zero.range.start = (uintptr_t)mem;
	reg.range.len = zero.range.len = bytes;
	FAIL_IF(ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &reg), "UFFDIO_REGISTER");
	FAIL_IF(ioctl(fd, UFFDIO_ZEROPAGE, &zero), "UFFDIO_ZEROPAGE");
	must_be_zero(mem, bytes);
	return check_touched(mem, bytes);
}

/* Zero pages and filled pages alternate; each must come back with its content. */
static long check_swapped(unsigned char *mem, size_t bytes)
{
	char text[512];
	size_t i;

	if (kz_read_file("/proc/swaps", text, sizeof(text)) < 0 || !strchr(text, '/'))
		return cannot("no swap is in use");
	for (i = 0; i < bytes; i += PAGE)
		memset(mem + i, i / PAGE % 2 ? (int)fill : 0, PAGE);
	FAIL_IF(madvise(mem, bytes, MADV_PAGEOUT), "MADV_PAGEOUT");
	for (i = 0; i < bytes; i += PAGE) {
		if (i / PAGE % 2 == 0)
			must_be_zero(mem + i, PAGE);
		else if (mem[i] != fill || memcmp(mem + i, mem + i + 1, PAGE - 1))
			leak(mem, i, mem[i]);
	}
	return pages_of(bytes);
}

/* Zeroed pages that are perhaps merged by now; a write takes a copy. */
static long check_merged(unsigned char *mem, size_t bytes)
{
	if (access("/sys/kernel/mm/ksm/run", R_OK))
		return cannot("the kernel has no KSM");
	FAIL_IF(madvise(mem, bytes, MADV_MERGEABLE), "MADV_MERGEABLE");
	memset(mem, 0, bytes);
	usleep(50000);
	return check_touched(mem, bytes);
}

/* The hunt */

#define RUN(name) { #name, .run = run_##name }
#define MAP(name, low, high, unit, flags, check) \
	{ #name, run_map, low, high, unit, flags, check, 0 }
#define FILE_MAP(name, low, high, unit, memfd, check) \
	{ #name, run_map, low, high, unit, MAP_SHARED, check, memfd }

static const struct kind fixed_kinds[] = {
	MAP(anon_4k, 1, 2048, PAGE, ANON, check_small),
	{ "thp", run_folio, .unit = KZ_HUGE },
	RUN(brk), RUN(stack), RUN(bss), RUN(mremap), RUN(dev_zero),
	MAP(fork_cow, 1, 512, PAGE, ANON, check_fork_cow),
	MAP(dontneed, 1, 1024, PAGE, ANON, check_dontneed),
	MAP(mlock, 1, 256, PAGE, ANON, check_locked),
	MAP(page_tables, 1, 256, KZ_HUGE, ANON | MAP_NORESERVE, check_tables),
	RUN(shmem_write), RUN(shmem_fallocate), RUN(tmpfs_huge),
	FILE_MAP(shmem_mmap, 1, 1024, PAGE, MFD_CLOEXEC, check_punched),
	FILE_MAP(shmem_huge, 1, 4, KZ_HUGE, MFD_CLOEXEC, check_punched),
	RUN(file_tail), RUN(splice_tail), RUN(sysv_shm), RUN(memfd_secret),
	MAP(hugetlb_pool, 1, 4, KZ_HUGE, HUGETLB, check_populated),
	/* More than the pool has: the rest is surplus, straight from the allocator. */
	MAP(hugetlb_surplus, 9, 20, KZ_HUGE, HUGETLB, check_populated),
	/* Without a reservation the fault itself allocates the pages that the pool lacks. */
	MAP(hugetlb_noreserve, 9, 20, KZ_HUGE, HUGETLB | MAP_NORESERVE, check_populated),
	MAP(hugetlb_cow, 1, 2, KZ_HUGE, HUGETLB, check_hugetlb_cow),
	MAP(hugetlb_1g, 1, 1, 1UL << 30, HUGETLB | HUGE_1G, check_populated),
	/* The fault makes one folio of pieces that are not all alike. */
	MAP(hugetlb_1g_noreserve, 1, 1, 1UL << 30, HUGETLB | HUGE_1G | MAP_NORESERVE, check_populated),
	FILE_MAP(hugetlb_memfd, 1, 4, KZ_HUGE, MFD_HUGETLB, check_populated),
	RUN(hugetlb_grow), RUN(hugetlb_file), RUN(hugetlb_udmabuf),
	RUN(hugetlb_demote),
	RUN(perf_ring), RUN(io_uring), RUN(aio_ring), RUN(packet_ring), RUN(bpf_array),
	RUN(bpf_percpu), RUN(dma_heap),
	MAP(userfaultfd, 1, 256, PAGE, 0, check_zeropage),
	MAP(swap, 16, 512, PAGE, ANON, check_swapped),
	MAP(ksm, 16, 256, PAGE, ANON, check_merged),
};

/* The fixed kinds, and one for each size of folio that this kernel has. */
static void add_kinds(void)
{
	unsigned long kb;
	char path[128];

	nr_kinds = sizeof(fixed_kinds) / sizeof(fixed_kinds[0]);
	memcpy(kinds, fixed_kinds, sizeof(fixed_kinds));
	for (kb = 8; kb < 2048; kb *= 2) {
		snprintf(path, sizeof(path), THP_DIR "/hugepages-%lukB/enabled", kb);
		if (access(path, R_OK))
			continue;
		kinds[nr_kinds] = (struct kind){ .run = run_folio, .unit = kb * 1024 };
		snprintf(kinds[nr_kinds++].name, sizeof(kinds[0].name), "mthp_%luk", kb);
	}
}

/* A swap device needs a header: its version, its last page and, at the page's end, a name. */
static void swap_on_zram(void)
{
	static unsigned char header[PAGE];
	uint32_t *info = (uint32_t *)(void *)(header + 1024);

	if (kz_write_file("/sys/block/zram0/disksize", "128M"))
		return;
	KZ_FD fd = open("/dev/zram0", O_WRONLY | O_CLOEXEC);

	info[0] = 1;
	info[1] = 128 * KZ_MB / PAGE - 1;
	memcpy(header + PAGE - 10, "SWAPSPACE2", 10);
	if (fd >= 0 && write(fd, header, PAGE) == (ssize_t)PAGE && !fsync(fd))
		swapon("/dev/zram0", 0);
}

/* Enables features that are off by default, for more kinds. A failure means a skipped kind. */
static void set_up(void)
{
	static const char *const settings[][2] = {
		{ THP_DIR "/enabled", "madvise" }, { THP_DIR "/shmem_enabled", "advise" },
		{ POOL, "8" }, { "/proc/sys/vm/nr_overcommit_hugepages", "64" },
		{ POOL_1G "nr_hugepages", "1" }, { "/sys/kernel/mm/ksm/use_zero_pages", "1" },
		{ "/sys/kernel/mm/ksm/pages_to_scan", "1000" }, { "/sys/kernel/mm/ksm/run", "1" },
	};
	char path[128];
	unsigned long kb;
	size_t i;

	for (kb = 8; kb <= 2048; kb *= 2) {
		snprintf(path, sizeof(path), THP_DIR "/hugepages-%lukB/enabled", kb);
		kz_write_file(path, "madvise");
		snprintf(path, sizeof(path), THP_DIR "/hugepages-%lukB/shmem_enabled", kb);
		kz_write_file(path, "advise");
	}
	for (i = 0; i < sizeof(settings) / sizeof(settings[0]); i++)
		kz_write_file(settings[i][0], settings[i][1]);
	swap_on_zram();
	if (mkdir(tmpfs_dir, 0700) || mount("none", tmpfs_dir, "tmpfs", 0, "huge=always,size=128M"))
		rmdir(tmpfs_dir);
}

static void dirty_free_memory(uint64_t until, unsigned long most)
{
	unsigned long room = kz_meminfo("MemAvailable");
	size_t bytes, done;
	unsigned char *mem;

	/* A part is left for the other workers. */
	room = room > 128 * KZ_MB ? (room - 128 * KZ_MB) / nr_workers : 0;
	most = most < dirty_limit * KZ_MB ? most : dirty_limit * KZ_MB;
	room = room < most ? room : most;
	if (room < KZ_HUGE)
		return;
	bytes = kz_between(1, room / KZ_HUGE) * KZ_HUGE;
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, ANON | MAP_NORESERVE, -1, 0);
	if (mem == MAP_FAILED)
		return;
	madvise(mem, bytes, kz_rng() & 1 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	for (done = 0; done < bytes; done += KZ_HUGE) {
		if (kz_meminfo("MemAvailable") < 96 * KZ_MB || kz_now_ns() > until)
			break;
		soil(mem + done, KZ_HUGE);
	}
	munmap(mem, bytes);
	__atomic_add_fetch(&shared->dirtied_bytes, done, __ATOMIC_RELAXED);
}

/*
 * Each round has every kind once, in a random order, so that a short or slow hunt does not leave
 * kinds out by chance. The workers share the rounds. The order is that of a hash.
 */
static int next_kind(void)
{
	const uint64_t n = (uint64_t)nr_kinds, turn = __atomic_fetch_add(&shared->turns, 1, __ATOMIC_RELAXED);
	uint64_t hash[MAX_KINDS], saved = kz_rng_state, i, j, before;

	kz_rng_state = kz_mix(~seed) + turn / n * MAX_KINDS;
	for (i = 0; i < n; i++)
		hash[i] = kz_rng();
	kz_rng_state = saved;
	for (i = 0, before = n; i < n && before != turn % n; i++)
		for (j = 0, before = 0; j < n; j++)
			before += hash[j] < hash[i];
	return (int)i - 1;
}

static bool goes_on(void)
{
	return kz_now_ns() < shared->deadline ||
	       (shared->deadline && whole_round && only < 0 &&
		__atomic_load_n(&shared->turns, __ATOMIC_RELAXED) < (uint64_t)nr_kinds);
}

static void worker(unsigned long index)
{
	const uint64_t now = kz_now_ns(), deadline = shared->deadline;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	kz_write_file("/proc/self/oom_score_adj", "500");
	answer = kz_map(sizeof(*answer), MAP_SHARED | MAP_ANONYMOUS);
	kz_rng_state = kz_mix(kz_mix(seed) + index);
	/* On a slow machine this must not take all the time. */
	if (now < deadline)
		dirty_free_memory(now + (deadline - now) / 3, ULONG_MAX);
	while (goes_on()) {
		unsigned long dice = kz_between(0, 63);
		long pages;
		int k;

		if (dice < 4) {
			dirty_free_memory(shared->deadline, 128 * KZ_MB);
			continue;
		}
		if (dice < 6) {
			if (!kz_write_file("/sys/kernel/mm/page_reporting/flush", "0"))
				__atomic_add_fetch(&shared->flushes, 1, __ATOMIC_RELAXED);
			continue;
		}
		k = only >= 0 ? only : next_kind();
		current = &kinds[k];
		pages = current->run();
		if (pages < 0) {
			__atomic_add_fetch(&shared->kind[k].failed, 1, __ATOMIC_RELAXED);
			memcpy(shared->kind[k].reason, why, sizeof(why));
		} else {
			__atomic_add_fetch(&shared->kind[k].pages, (uint64_t)pages, __ATOMIC_RELAXED);
			__atomic_add_fetch(&shared->kind[k].runs, 1, __ATOMIC_RELAXED);
		}
	}
	_exit(KZ_OK);
}

/* Runs the workers to their end; false if one crashed or found a leak. */
static bool hunt(unsigned long *killed)
{
	unsigned long index;
	bool good = true;
	int status;

	for (index = 0; index < nr_workers; index++)
		if (!kz_fork())
			worker(index);
	while (wait(&status) > 0) {
		if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
			/* Memory ran out: another worker takes its place. */
			++*killed;
			if (goes_on() && !kz_fork())
				worker(index);
			index++;
		} else if (status) {
			if (WIFSIGNALED(status))
				fprintf(stderr, "leak_hunter: a worker was killed by signal %d, perhaps by a kernel fault; see the kernel log (dmesg)\n",
					WTERMSIG(status));
			/* The first failure ends the hunt, with the evidence still fresh. */
			good = false;
			shared->deadline = 0;
		}
	}
	return good;
}

static uint64_t report(unsigned long seconds, uint64_t began, unsigned long killed,
		       const struct kz_vmstat *before)
{
	static struct kz_vmstat after;
	uint64_t total = 0;
	int k, skipped;

	kz_vmstat_read(&after);
	printf("{\"seconds\": %lu, \"elapsed_ms\": %" PRIu64 ", \"seed\": %lu, \"workers\": %lu, ",
	       seconds, (kz_now_ns() - began) / 1000000, seed, nr_workers);
	for (skipped = 0; skipped < 2; skipped++) {
		const char *separator = skipped ? "\"skipped\": {" : "\"checked_pages\": {";

		for (k = 0; k < nr_kinds; k++) {
			if (skipped == !!shared->kind[k].runs)
				continue;
			printf("%s\"%s\": ", separator, kinds[k].name);
			separator = ", ";
			if (!skipped)
				printf("%" PRIu64, shared->kind[k].pages);
			else
				kz_json_text(shared->kind[k].failed ? shared->kind[k].reason :
					     "its turn did not come in the time given");
			total += shared->kind[k].pages;
		}
		printf("%s}, ", *separator == ',' ? "" : separator);
	}
	printf("\"total_pages\": %" PRIu64 ", \"dirtied_bytes\": %" PRIu64
	       ", \"flushes\": %" PRIu64 ", \"workers_killed\": %lu, \"violations\": %" PRIu64 ", ",
	       total, shared->dirtied_bytes, shared->flushes, killed, shared->violations);
	kz_vmstat_print_delta(before, &after);
	printf("}\n");
	return total;
}

static const char usage[] =
"usage: leak_hunter [options]\n"
"Dirties free memory and reads new memory of every kind as zero; prints one JSON line.\n"
"  --seconds S      duration (default 10)\n"
"  --whole-round    go on until every kind had its turn\n"
"  --seed N         the random choices (default 1)\n"
"  --workers N      processes, 1 to 16 (default 2)\n"
"  --byte VALUE     dirty free memory with this byte, 1 to 255 (default 0x5a)\n"
"  --dirty MB       dirty at most this much at once in each process (default: free memory)\n"
"  --kind NAME      this kind only (--list names them)\n"
"  --setup          change the system so that more kinds run: huge page settings, KSM, swap\n"
"                   on zram, a tmpfs; for throwaway guests\n"
"  --plant          plant a byte that is not zero: the hunt must fail\n"
"  --list           name the kinds and end\n"
"  --help           this text\n"
"Exit: 0 all zero, 1 a byte was not zero or a worker crashed, 2 bad usage, 3 nothing checked.\n";

int main(int argc, char **argv)
{
	unsigned long seconds = 10, killed = 0;
	const char *only_name = NULL, *bss_seed = NULL;
	bool list = false, good;
	const struct kz_option options[] = {
		{ "seconds", .number = &seconds, .min = 1, .max = 1000000 },
		{ "whole-round", .flag = &whole_round },
		{ "seed", .number = &seed, .max = ULONG_MAX - 1 },
		{ "workers", .number = &nr_workers, .min = 1, .max = 16 },
		{ "byte", .number = &fill, .min = 1, .max = 255 },
		{ "dirty", .number = &dirty_limit, .max = 1UL << 20 },
		{ "kind", .text = &only_name },
		{ "setup", .flag = &throwaway },
		{ "plant", .flag = &plant },
		{ "list", .flag = &list },
		{ "check-bss", .text = &bss_seed },
		{ 0 },
	};
	static struct kz_vmstat before;
	uint64_t began;
	int i;

	kz_only_options(argc, argv, "leak_hunter", usage, options);
	if (bss_seed)
		return check_bss(bss_seed);
	add_kinds();
	for (i = 0; i < nr_kinds; i++) {
		if (list)
			puts(kinds[i].name);
		if (only_name && !strcmp(kinds[i].name, only_name))
			only = i;
	}
	if (list)
		return KZ_OK;
	if (only_name && only < 0)
		kz_die(KZ_USAGE, "--kind: '%s' is unknown; see leak_hunter --list", only_name);
	shared = kz_map(sizeof(*shared), MAP_SHARED | MAP_ANONYMOUS);
	if (throwaway)
		set_up();

	kz_vmstat_read(&before);
	began = kz_now_ns();
	shared->deadline = began + seconds * 1000000000ULL;
	good = hunt(&killed);
	if (!report(seconds, began, killed, &before) && good)
		kz_die(KZ_BROKEN, "nothing was checked: no kind could run, see \"skipped\"; try --setup in a throwaway guest");
	if (throwaway && !umount(tmpfs_dir))
		rmdir(tmpfs_dir);
	return good && !shared->violations ? KZ_OK : KZ_FAILED;
}
