// SPDX-License-Identifier: GPL-2.0
/*
 * Tests for refpage_create(2): private mappings that start with a pattern.
 *
 * Every test runs for patterns that the kernel treats differently: zeros, one byte
 * or one word again and again, and anything else up to a page. What a test cannot
 * have here (swap, root, a driver) makes it skip.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kselftest_harness.h"

#ifndef __NR_refpage_create
#ifdef __alpha__
#define __NR_refpage_create 583
#else
#define __NR_refpage_create 473
#endif
#endif

#ifndef MADV_COLD
#define MADV_COLD 20
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_HWPOISON
#define MADV_HWPOISON 100
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef UFFD_FEATURE_WP_HUGETLBFS_SHMEM
#define UFFD_FEATURE_WP_HUGETLBFS_SHMEM (1 << 12)
#endif
#ifndef UFFD_FEATURE_RWP
#define UFFD_FEATURE_RWP (1 << 17)
#endif
#ifndef UFFDIO_REGISTER_MODE_RWP
#define UFFDIO_REGISTER_MODE_RWP ((__u64)1 << 3)
#endif

/* From mm/gup_test.h */
struct pin_longterm_test {
	uint64_t addr;
	uint64_t size;
	uint32_t flags;
};

#define PIN_LONGTERM_TEST_START	_IOW('g', 7, struct pin_longterm_test)
#define PIN_LONGTERM_TEST_STOP	_IO('g', 8)
#define PIN_LONGTERM_TEST_READ	_IOW('g', 9, uint64_t)
#define PIN_LONGTERM_FLAG_FAST	2

#define NR_PAGES	64
#define WRITTEN		0x77	/* in no pattern */

static size_t page_size;

static int refpage_create(const void *content, size_t size, unsigned int flags)
{
	return syscall(__NR_refpage_create, content, size, flags);
}

FIXTURE(refpage)
{
	unsigned char *want;	/* a page as it should look */
	unsigned char *mem;
	size_t size;
	int fd;
	int pagemap;
};

FIXTURE_VARIANT(refpage)
{
	unsigned char bytes[16];
	size_t size;		/* 0: a whole page of different bytes */
};

FIXTURE_VARIANT_ADD(refpage, zero) { .bytes = { 0 }, .size = 1 };
FIXTURE_VARIANT_ADD(refpage, byte) { .bytes = { 0xaa }, .size = 1 };
FIXTURE_VARIANT_ADD(refpage, word) {
	.bytes = { 0xde, 0xad, 0xbe, 0xef, 1, 2, 3, 4 },
	.size = 8,
};
FIXTURE_VARIANT_ADD(refpage, two_words) {
	.bytes = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 },
	.size = 16,
};
FIXTURE_VARIANT_ADD(refpage, page) { .size = 0 };

FIXTURE_SETUP(refpage)
{
	size_t size = variant->size;
	size_t i;

	page_size = sysconf(_SC_PAGESIZE);
	self->mem = MAP_FAILED;
	self->size = NR_PAGES * page_size;
	self->want = malloc(page_size);
	ASSERT_NE(self->want, NULL);
	for (i = 0; i < page_size; i++)
		self->want[i] = size ? variant->bytes[i % size] : (i * 7 + i / 256) & 0x3f;

	self->fd = refpage_create(self->want, size ?: page_size, 0);
	if (self->fd < 0 && errno == ENOSYS)
		SKIP(return, "no refpage_create() in this kernel");
	ASSERT_GE(self->fd, 0);

	self->mem = mmap(NULL, self->size, PROT_READ | PROT_WRITE, MAP_PRIVATE,
			 self->fd, 0);
	ASSERT_NE(self->mem, MAP_FAILED);

	self->pagemap = open("/proc/self/pagemap", O_RDONLY);
	ASSERT_GE(self->pagemap, 0);
}

FIXTURE_TEARDOWN(refpage)
{
	if (self->mem != MAP_FAILED)
		munmap(self->mem, self->size);
	close(self->pagemap);
	close(self->fd);
	free(self->want);
}

static bool is_pattern(FIXTURE_DATA(refpage) * self, const void *mem, size_t pages)
{
	size_t i;

	for (i = 0; i < pages; i++)
		if (memcmp((char *)mem + i * page_size, self->want, page_size))
			return false;

	return true;
}

/* As is_pattern() for one page, with one byte that was written to. */
static bool is_written(FIXTURE_DATA(refpage) * self, const unsigned char *page,
		       size_t at)
{
	return !memcmp(page, self->want, at) && page[at] == WRITTEN &&
	       !memcmp(page + at + 1, self->want + at + 1, page_size - at - 1);
}

#define PM_SWAP		(1ULL << 62)
#define PM_PRESENT	(1ULL << 63)
#define PM_FILE		(1ULL << 61)
#define PM_PFN		((1ULL << 55) - 1)

static uint64_t pagemap_of(FIXTURE_DATA(refpage) * self, const void *mem)
{
	uint64_t entry = 0;

	if (pread(self->pagemap, &entry, sizeof(entry),
		  (uintptr_t)mem / page_size * sizeof(entry)) != sizeof(entry))
		return 0;

	return entry;
}

static bool is_anon(FIXTURE_DATA(refpage) * self, const void *mem)
{
	uint64_t entry = pagemap_of(self, mem);

	return (entry & (PM_PRESENT | PM_SWAP)) && !(entry & PM_FILE);
}

static bool is_reference(FIXTURE_DATA(refpage) * self, const void *mem)
{
	uint64_t entry = pagemap_of(self, mem);

	return (entry & PM_PRESENT) && (entry & PM_FILE);
}

static void touch_all(const unsigned char *mem, size_t pages)
{
	size_t i;

	for (i = 0; i < pages; i++)
		(void)((const volatile unsigned char *)mem)[i * page_size];
}

static long number_in(const char *path, const char *name)
{
	char line[256];
	long value = -1;
	FILE *file = fopen(path, "r");

	if (!file)
		return -1;
	while (fgets(line, sizeof(line), file))
		if (!strncmp(line, name, strlen(name)) &&
		    sscanf(line + strlen(name), " %ld", &value) == 1)
			break;
	fclose(file);

	return value;
}

static bool write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	bool done;

	if (fd < 0)
		return false;
	done = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
	close(fd);

	return done;
}

static bool read_text(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY);
	ssize_t got;

	if (fd < 0)
		return false;
	got = read(fd, text, size - 1);
	close(fd);
	if (got < 0)
		return false;
	text[got] = '\0';

	return true;
}

/* The field of the mapping that starts at @mem, in kB. */
static long smaps_of(const void *mem, const char *name)
{
	char line[512], start[32];
	bool found = false;
	long value = -1;
	FILE *file = fopen("/proc/self/smaps", "r");

	if (!file)
		return -1;
	snprintf(start, sizeof(start), "%lx-", (unsigned long)mem);
	while (fgets(line, sizeof(line), file)) {
		if (!found)
			found = !strncmp(line, start, strlen(start));
		else if (!strncmp(line, name, strlen(name)) &&
			 sscanf(line + strlen(name), ": %ld", &value) == 1)
			break;
	}
	fclose(file);

	return value;
}

static int exit_of(pid_t pid)
{
	int status;

	if (waitpid(pid, &status, 0) != pid)
		return -1;

	return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

/*
 * The call
 */

TEST(call_errors)
{
	const size_t page = sysconf(_SC_PAGESIZE);
	struct rlimit old, none;
	unsigned char *content;
	int fd;

	page_size = page;
	content = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(content, MAP_FAILED);

	fd = refpage_create(content, 1, 0);
	if (fd < 0 && errno == ENOSYS)
		SKIP(return, "no refpage_create() in this kernel");
	ASSERT_GE(fd, 0);
	close(fd);

#define EXPECT_REFUSED(err, ...) do {				\
	EXPECT_EQ(-1, refpage_create(__VA_ARGS__));		\
	EXPECT_EQ(err, errno);					\
} while (0)
	EXPECT_REFUSED(EINVAL, content, 0, 0);
	EXPECT_REFUSED(EINVAL, content, 3, 0);
	EXPECT_REFUSED(EINVAL, content, page - 1, 0);
	EXPECT_REFUSED(EINVAL, content, page + 1, 0);
	EXPECT_REFUSED(EINVAL, content, 2 * page, 0);
	EXPECT_REFUSED(EINVAL, content, (size_t)1 << (sizeof(size_t) * 8 - 1), 0);
	EXPECT_REFUSED(EINVAL, content, SIZE_MAX, 0);
	EXPECT_REFUSED(EINVAL, content, page, 1);
	EXPECT_REFUSED(EINVAL, content, page, O_CLOEXEC);
	EXPECT_REFUSED(EINVAL, content, page, -1U);
	EXPECT_REFUSED(EFAULT, NULL, page, 0);
	EXPECT_REFUSED(EFAULT, (void *)-1L, 1, 0);

	/* Not one byte beyond the content is read. */
	ASSERT_EQ(0, munmap(content + page, page));
	EXPECT_REFUSED(EFAULT, content + page - 8, 16, 0);
	fd = refpage_create(content + page - 16, 16, 0);
	EXPECT_GE(fd, 0);
	close(fd);

	ASSERT_EQ(0, getrlimit(RLIMIT_NOFILE, &old));
	none = (struct rlimit){ .rlim_cur = 0, .rlim_max = old.rlim_max };
	ASSERT_EQ(0, setrlimit(RLIMIT_NOFILE, &none));
	EXPECT_REFUSED(EMFILE, content, page, 0);
	ASSERT_EQ(0, setrlimit(RLIMIT_NOFILE, &old));

	munmap(content, page);
}

TEST_F(refpage, file)
{
	char byte;

	EXPECT_EQ(FD_CLOEXEC, fcntl(self->fd, F_GETFD));
	EXPECT_EQ(-1, read(self->fd, &byte, 1));
	EXPECT_EQ(-1, write(self->fd, &byte, 1));
	EXPECT_EQ(-1, ftruncate(self->fd, page_size));
	EXPECT_EQ(-1, fallocate(self->fd, 0, 0, page_size));
	EXPECT_EQ(-1, ioctl(self->fd, FIONREAD, &byte));
}

TEST_F(refpage, private_only)
{
	const int prot = PROT_READ | PROT_WRITE;

	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, PROT_READ, MAP_SHARED, self->fd, 0));
	EXPECT_EQ(EINVAL, errno);
	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, PROT_READ, MAP_SHARED_VALIDATE,
				   self->fd, 0));
	EXPECT_EQ(EINVAL, errno);
	/* The descriptor is not open for writing, which is found out first. */
	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, prot, MAP_SHARED, self->fd, 0));
	EXPECT_EQ(EACCES, errno);
	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, PROT_WRITE, MAP_SHARED_VALIDATE,
				   self->fd, 0));
	EXPECT_EQ(EACCES, errno);
	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, prot | PROT_EXEC, MAP_PRIVATE,
				   self->fd, 0));
	EXPECT_EQ(EPERM, errno);
	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, PROT_READ | PROT_EXEC, MAP_SHARED,
				   self->fd, 0));
	EXPECT_EQ(EPERM, errno);
	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, prot, MAP_PRIVATE | MAP_GROWSDOWN,
				   self->fd, 0));
	EXPECT_EQ(EINVAL, errno);
	EXPECT_EQ(-1, mprotect(self->mem, page_size, PROT_READ | PROT_EXEC));
	EXPECT_EQ(EACCES, errno);
}

TEST_F(refpage, content_is_copied)
{
	unsigned char *want = malloc(page_size);

	ASSERT_NE(want, NULL);
	memcpy(want, self->want, page_size);
	/* A change of what was passed to the call. */
	memset(self->want, 0x5b, page_size);
	EXPECT_EQ(0, memcmp(self->mem, want, page_size));
	memcpy(self->want, want, page_size);
	free(want);
}

TEST_F(refpage, any_offset)
{
	off_t offset = (off_t)page_size << 20;
	unsigned char *mem = mmap(NULL, 4 * page_size, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE, self->fd, offset);

	ASSERT_NE(mem, MAP_FAILED);
	EXPECT_TRUE(is_pattern(self, mem, 4));
	mem[page_size + 3] = WRITTEN;
	EXPECT_TRUE(is_written(self, mem + page_size, 3));
	munmap(mem, 4 * page_size);
}

TEST_F(refpage, outlives_the_descriptor)
{
	ASSERT_EQ(0, close(self->fd));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES / 2));
	self->mem[(NR_PAGES - 1) * page_size] = WRITTEN;
	EXPECT_TRUE(is_written(self, self->mem + (NR_PAGES - 1) * page_size, 0));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES - 1));
}

/*
 * Reads and writes
 */

TEST_F(refpage, reads_share_one_page)
{
	uint64_t first;
	size_t i;

	EXPECT_FALSE(pagemap_of(self, self->mem) & PM_PRESENT);
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));
	first = pagemap_of(self, self->mem);
	for (i = 0; i < NR_PAGES; i++) {
		EXPECT_TRUE(is_reference(self, self->mem + i * page_size));
		EXPECT_EQ(first & PM_PFN,
			  pagemap_of(self, self->mem + i * page_size) & PM_PFN);
	}
}

TEST_F(refpage, first_write)
{
	size_t i;

	for (i = 0; i < NR_PAGES; i += 2) {
		unsigned char *page = self->mem + i * page_size;
		size_t at = (i * 131) % page_size;

		page[at] = WRITTEN;
		EXPECT_TRUE(is_written(self, page, at));
		EXPECT_TRUE(is_anon(self, page));
		EXPECT_TRUE(is_pattern(self, page + page_size, 1));
		EXPECT_TRUE(is_reference(self, page + page_size));
	}
}

TEST_F(refpage, write_after_read)
{
	size_t i;

	touch_all(self->mem, NR_PAGES);
	for (i = 0; i < NR_PAGES; i += 2) {
		unsigned char *page = self->mem + i * page_size;

		page[page_size - 1] = WRITTEN;
		EXPECT_TRUE(is_written(self, page, page_size - 1));
		EXPECT_TRUE(is_anon(self, page));
		EXPECT_TRUE(is_pattern(self, page + page_size, 1));
	}
}

TEST_F(refpage, two_mappings)
{
	unsigned char *other = mmap(NULL, self->size, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE, self->fd, 0);

	ASSERT_NE(other, MAP_FAILED);
	memset(self->mem, WRITTEN, self->size);
	EXPECT_TRUE(is_pattern(self, other, NR_PAGES));
	other[5] = WRITTEN;
	EXPECT_TRUE(is_written(self, other, 5));
	munmap(other, self->size);
}

/* Free memory is dirty, so that a page that nobody initialised shows. */
TEST_F(refpage, nothing_uninitialised)
{
	const size_t size = 16UL << 20;
	unsigned char *dirt, *mem;
	size_t i;

	dirt = mmap(NULL, size, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(dirt, MAP_FAILED);
	memset(dirt, 0x5b, size);
	munmap(dirt, size);

	mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, self->fd, 0);
	ASSERT_NE(mem, MAP_FAILED);
	for (i = 0; i < size; i += page_size) {
		mem[i] = WRITTEN;
		ASSERT_TRUE(is_written(self, mem + i, 0)) {
			TH_LOG("page %zu is not as it should be", i / page_size);
		}
	}
	munmap(mem, size);
}

/*
 * Operations on the mapping
 */

TEST_F(refpage, dontneed)
{
	memset(self->mem, WRITTEN, self->size);
	ASSERT_EQ(0, madvise(self->mem, self->size / 2, MADV_DONTNEED));
	EXPECT_FALSE(pagemap_of(self, self->mem) & PM_PRESENT);
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES / 2));
	EXPECT_EQ(WRITTEN, self->mem[self->size / 2]);
	/* Once more, now that it shows the reference page. */
	ASSERT_EQ(0, madvise(self->mem, self->size, MADV_DONTNEED));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));
}

TEST_F(refpage, protection)
{
	pid_t pid;

	ASSERT_EQ(0, mprotect(self->mem, self->size, PROT_NONE));
	ASSERT_EQ(0, mprotect(self->mem, self->size, PROT_READ));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));

	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		signal(SIGSEGV, SIG_DFL);
		*(volatile unsigned char *)self->mem = WRITTEN;
		_exit(0);
	}
	EXPECT_EQ(256 + SIGSEGV, exit_of(pid));

	ASSERT_EQ(0, mprotect(self->mem, self->size, PROT_READ | PROT_WRITE));
	self->mem[1] = WRITTEN;
	EXPECT_TRUE(is_written(self, self->mem, 1));
	EXPECT_TRUE(is_pattern(self, self->mem + page_size, NR_PAGES - 1));

	/* A written page keeps what it holds, and stays private. */
	ASSERT_EQ(0, mprotect(self->mem, self->size, PROT_READ));
	ASSERT_EQ(0, mprotect(self->mem, self->size, PROT_READ | PROT_WRITE));
	EXPECT_TRUE(is_written(self, self->mem, 1));
}

TEST_F(refpage, mremap)
{
	unsigned char *moved, *grown, *left;

	self->mem[0] = WRITTEN;
	touch_all(self->mem, 4);

	/* Moved and grown: the new part starts with the pattern as well. */
	grown = mremap(self->mem, self->size, 2 * self->size, MREMAP_MAYMOVE);
	ASSERT_NE(grown, MAP_FAILED);
	self->mem = grown;
	EXPECT_TRUE(is_written(self, grown, 0));
	EXPECT_TRUE(is_pattern(self, grown + page_size, 2 * NR_PAGES - 1));

	grown = mremap(grown, 2 * self->size, self->size, 0);
	ASSERT_EQ(grown, self->mem);

	/* The old place stays mapped, and nothing is left there but the pattern. */
	left = self->mem;
	moved = mremap(self->mem, self->size, self->size,
		       MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
	ASSERT_NE(moved, MAP_FAILED);
	EXPECT_TRUE(is_written(self, moved, 0));
	EXPECT_TRUE(is_pattern(self, moved + page_size, NR_PAGES - 1));
	EXPECT_TRUE(is_pattern(self, left, NR_PAGES));
	munmap(moved, self->size);
}

TEST_F(refpage, mlock)
{
	unsigned char *mem;
	size_t i;

	/* Only read: the reference page is what is locked. */
	mem = mmap(NULL, 4 * page_size, PROT_READ, MAP_PRIVATE, self->fd, 0);
	ASSERT_NE(mem, MAP_FAILED);
	ASSERT_EQ(0, mlock(mem, 4 * page_size));
	EXPECT_TRUE(is_reference(self, mem));
	EXPECT_TRUE(is_pattern(self, mem, 4));
	ASSERT_EQ(0, munlock(mem, 4 * page_size));
	ASSERT_EQ(0, mlock(mem, 4 * page_size));
	munmap(mem, 4 * page_size);

	/* Writable: all pages are there, so that no write has to wait. */
	ASSERT_EQ(0, mlock(self->mem, 8 * page_size));
	for (i = 0; i < 8; i++)
		EXPECT_TRUE(is_anon(self, self->mem + i * page_size));
	EXPECT_TRUE(is_pattern(self, self->mem, 8));
	ASSERT_EQ(0, munlock(self->mem, 8 * page_size));
}

TEST_F(refpage, populate)
{
	unsigned char *mem;
	size_t i;

	ASSERT_EQ(0, madvise(self->mem, self->size / 2, MADV_POPULATE_READ));
	EXPECT_TRUE(is_reference(self, self->mem));
	ASSERT_EQ(0, madvise(self->mem, self->size, MADV_POPULATE_WRITE));
	for (i = 0; i < NR_PAGES; i++)
		EXPECT_TRUE(is_anon(self, self->mem + i * page_size));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));

	mem = mmap(NULL, self->size, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_POPULATE, self->fd, 0);
	ASSERT_NE(mem, MAP_FAILED);
	EXPECT_TRUE(is_anon(self, mem));
	EXPECT_TRUE(is_pattern(self, mem, NR_PAGES));
	munmap(mem, self->size);
}

/* Advice changes no content; what does not fit is refused. */
TEST_F(refpage, advice)
{
	static const int harmless[] = {
		MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED,
		MADV_COLD, MADV_PAGEOUT, MADV_DONTFORK, MADV_DOFORK,
		MADV_DONTDUMP, MADV_DODUMP,
	};
	static const int refused[] = {
		MADV_FREE, MADV_REMOVE, MADV_WIPEONFORK, MADV_COLLAPSE,
	};
	size_t i;

	self->mem[7] = WRITTEN;
	touch_all(self->mem, NR_PAGES / 2);
	for (i = 0; i < ARRAY_SIZE(harmless); i++)
		EXPECT_EQ(0, madvise(self->mem, self->size, harmless[i])) {
			TH_LOG("advice %d: %m", harmless[i]);
		}
	for (i = 0; i < ARRAY_SIZE(refused); i++)
		EXPECT_EQ(-1, madvise(self->mem, self->size, refused[i])) {
			TH_LOG("advice %d", refused[i]);
		}
	/* Where there are huge pages, they are not for this mapping. */
	madvise(self->mem, self->size, MADV_HUGEPAGE);

	EXPECT_TRUE(is_written(self, self->mem, 7));
	EXPECT_TRUE(is_pattern(self, self->mem + page_size, NR_PAGES - 1));
}

TEST_F(refpage, guard)
{
	self->mem[0] = WRITTEN;
	if (madvise(self->mem, self->size / 2, MADV_GUARD_INSTALL) && errno == EINVAL)
		SKIP(return, "no guard regions");
	ASSERT_EQ(0, madvise(self->mem, self->size / 2, MADV_GUARD_REMOVE));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));
	self->mem[0] = WRITTEN;
	EXPECT_TRUE(is_written(self, self->mem, 0));
}

TEST_F(refpage, fork)
{
	pid_t pid;

	self->mem[0] = WRITTEN;
	touch_all(self->mem, NR_PAGES / 2);

	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		bool fine = is_written(self, self->mem, 0) &&
			    is_pattern(self, self->mem + page_size, NR_PAGES - 1);

		memset(self->mem, 0x5b, 8 * page_size);
		madvise(self->mem, page_size, MADV_DONTNEED);
		fine = fine && is_pattern(self, self->mem, 1) &&
		       self->mem[page_size] == 0x5b;
		/* A child of the child. */
		pid = fork();
		if (!pid)
			_exit(!(self->mem[page_size] == 0x5b &&
				is_pattern(self, self->mem, 1) &&
				is_pattern(self, self->mem + 8 * page_size, 8)));
		fine = fine && exit_of(pid) == 0;
		_exit(!fine);
	}
	EXPECT_EQ(0, exit_of(pid));
	EXPECT_TRUE(is_written(self, self->mem, 0));
	EXPECT_TRUE(is_pattern(self, self->mem + page_size, NR_PAGES - 1));
}

/*
 * What memory management does to it
 */

static bool has_swap(void)
{
	return number_in("/proc/meminfo", "SwapFree:") > 32 * 1024;
}

TEST_F(refpage, swap)
{
	size_t i, swapped = 0;

	if (!has_swap())
		SKIP(return, "no swap");

	for (i = 0; i < NR_PAGES / 2; i++)
		self->mem[i * page_size + i] = WRITTEN;
	touch_all(self->mem, NR_PAGES);
	ASSERT_EQ(0, madvise(self->mem, self->size, MADV_PAGEOUT));
	for (i = 0; i < NR_PAGES; i++)
		swapped += !!(pagemap_of(self, self->mem + i * page_size) & PM_SWAP);
	EXPECT_TRUE(swapped);
	EXPECT_TRUE(swapped <= NR_PAGES / 2);

	/* Dropped while it is swapped out. */
	ASSERT_EQ(0, madvise(self->mem, 4 * page_size, MADV_DONTNEED));
	EXPECT_TRUE(is_pattern(self, self->mem, 4));
	for (i = 4; i < NR_PAGES / 2; i++)
		EXPECT_TRUE(is_written(self, self->mem + i * page_size, i));
	EXPECT_TRUE(is_pattern(self, self->mem + self->size / 2, NR_PAGES / 2));
}

TEST_F_TIMEOUT(refpage, pressure, 240)
{
	size_t size = number_in("/proc/meminfo", "MemAvailable:") * 1024UL;
	unsigned char *mem;
	size_t i;

	if (!has_swap())
		SKIP(return, "no swap");
	if (size > 512UL << 20)
		SKIP(return, "more memory than this test wants to fill");

	size = (size + (32UL << 20)) & ~(page_size - 1);
	mem = mmap(NULL, size, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_NORESERVE, self->fd, 0);
	ASSERT_NE(mem, MAP_FAILED);
	for (i = 0; i < size / page_size; i++)
		if (i % 8)
			mem[i * page_size + i % page_size] = WRITTEN;
	for (i = 0; i < size / page_size; i++) {
		const unsigned char *page = mem + i * page_size;

		ASSERT_TRUE(i % 8 ? is_written(self, page, i % page_size) :
				    is_pattern(self, page, 1)) {
			TH_LOG("page %zu of %zu", i, size / page_size);
		}
	}
	munmap(mem, size);
}

#define KSM_DIR "/sys/kernel/mm/ksm/"

TEST_F(refpage, ksm)
{
	char old_run[16], old_scan[16];
	long merged = -1;
	size_t i;

	if (!read_text(KSM_DIR "run", old_run, sizeof(old_run)) ||
	    !read_text(KSM_DIR "pages_to_scan", old_scan, sizeof(old_scan)) ||
	    !write_text(KSM_DIR "pages_to_scan", "1000"))
		SKIP(return, "no KSM, or not allowed");

	for (i = 0; i < NR_PAGES / 2; i++)
		self->mem[i * page_size] = WRITTEN;
	touch_all(self->mem, NR_PAGES);
	ASSERT_EQ(0, madvise(self->mem, self->size, MADV_MERGEABLE));
	write_text(KSM_DIR "run", "1");
	for (i = 0; i < 100 && merged < NR_PAGES / 2 - 1; i++) {
		usleep(50000);
		merged = number_in(KSM_DIR "pages_sharing", "");
	}
	EXPECT_GE(merged, NR_PAGES / 2 - 1);

	for (i = 0; i < NR_PAGES / 2; i++)
		EXPECT_TRUE(is_written(self, self->mem + i * page_size, 0));
	EXPECT_TRUE(is_pattern(self, self->mem + self->size / 2, NR_PAGES / 2));
	self->mem[3 * page_size + 1] = WRITTEN;
	EXPECT_TRUE(is_written(self, self->mem, 0));
	EXPECT_EQ(WRITTEN, self->mem[3 * page_size + 1]);
	ASSERT_EQ(0, madvise(self->mem, page_size, MADV_DONTNEED));
	EXPECT_TRUE(is_pattern(self, self->mem, 1));

	write_text(KSM_DIR "run", "2");
	write_text(KSM_DIR "run", old_run);
	write_text(KSM_DIR "pages_to_scan", old_scan);
}

TEST_F(refpage, migration)
{
	void *pages[NR_PAGES];
	int nodes[NR_PAGES], status[NR_PAGES];
	size_t i;
	int round;

	if (access("/sys/devices/system/node/node1", F_OK))
		SKIP(return, "one node");

	for (i = 0; i < NR_PAGES; i++)
		pages[i] = self->mem + i * page_size;
	for (i = 0; i < NR_PAGES / 2; i++)
		self->mem[i * page_size] = WRITTEN;
	touch_all(self->mem, NR_PAGES);
	for (round = 0; round < 4; round++) {
		long moved;

		for (i = 0; i < NR_PAGES; i++)
			nodes[i] = round % 2;
		moved = syscall(SYS_move_pages, 0, NR_PAGES, pages, nodes,
				status, 2 /* MPOL_MF_MOVE */);

		if (moved < 0 && errno == ENOSYS)
			SKIP(return, "no move_pages()");
		/* What is left is the pages that show the reference page. */
		ASSERT_GE(moved, 0);
		for (i = 0; i < NR_PAGES / 2; i++)
			EXPECT_EQ(round % 2, status[i]);
		for (i = 0; i < NR_PAGES / 2; i++)
			EXPECT_TRUE(is_written(self, self->mem + i * page_size, 0));
		EXPECT_TRUE(is_pattern(self, self->mem + self->size / 2, NR_PAGES / 2));
	}
}

/*
 * The reference page has a memory error. If the content is known otherwise, another
 * page takes over; if not, nobody gets something else.
 */
TEST_F(refpage, memory_error)
{
	const bool known = variant->size && variant->size <= 8;
	pid_t pid;
	int way;

	touch_all(self->mem, 1);
	/* It says that it cannot handle such a page, but it marks it. */
	if (madvise(self->mem, page_size, MADV_HWPOISON) &&
	    (errno == EPERM || errno == EINVAL))
		SKIP(return, "no memory errors to order, or not allowed");
	ASSERT_EQ(0, madvise(self->mem, self->size, MADV_DONTNEED));

	for (way = 0; way < 2; way++) {
		pid = fork();
		ASSERT_GE(pid, 0);
		if (!pid) {
			signal(SIGBUS, SIG_DFL);
			if (way) {
				*(volatile unsigned char *)self->mem = WRITTEN;
				_exit(!is_written(self, self->mem, 0));
			}
			_exit(!is_pattern(self, self->mem, NR_PAGES));
		}
		EXPECT_EQ(known ? 0 : 256 + SIGBUS, exit_of(pid));
	}
}

/*
 * Access from elsewhere
 */

TEST_F(refpage, process_vm)
{
	unsigned char *buffer = malloc(self->size);
	struct iovec local = { .iov_base = buffer, .iov_len = self->size };
	struct iovec remote = { .iov_base = self->mem, .iov_len = self->size };
	ssize_t got;

	ASSERT_NE(buffer, NULL);
	got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
	if (got < 0 && errno == ENOSYS)
		SKIP(return, "no process_vm_readv()");
	ASSERT_EQ((ssize_t)self->size, got);
	EXPECT_TRUE(is_pattern(self, buffer, NR_PAGES));

	memset(buffer, WRITTEN, self->size);
	local.iov_len = remote.iov_len = 1;
	ASSERT_EQ(1, process_vm_writev(getpid(), &local, 1, &remote, 1, 0));
	EXPECT_TRUE(is_written(self, self->mem, 0));
	EXPECT_TRUE(is_pattern(self, self->mem + page_size, NR_PAGES - 1));
	free(buffer);
}

/* A debugger may write where the program itself may not. */
TEST_F(refpage, proc_mem)
{
	const unsigned char byte = WRITTEN;
	unsigned char *mem;
	ssize_t put;
	int fd;

	mem = mmap(NULL, 2 * page_size, PROT_READ, MAP_PRIVATE, self->fd, 0);
	ASSERT_NE(mem, MAP_FAILED);
	touch_all(mem, 1);
	fd = open("/proc/self/mem", O_RDWR);
	ASSERT_GE(fd, 0);
	put = pwrite(fd, &byte, 1, (uintptr_t)mem);
	if (put < 0 && errno == EIO)
		SKIP(return, "/proc/self/mem does not write what is read-only");
	ASSERT_EQ(1, put);
	ASSERT_EQ(1, pwrite(fd, &byte, 1, (uintptr_t)mem + page_size));
	EXPECT_TRUE(is_written(self, mem, 0));
	EXPECT_TRUE(is_written(self, mem + page_size, 0));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));
	close(fd);
	munmap(mem, 2 * page_size);
}

TEST_F(refpage, ptrace)
{
	long word, want;
	pid_t pid;

	/* Read-only: what the debugger writes does not ask for permission. */
	ASSERT_EQ(0, mprotect(self->mem, self->size, PROT_READ));
	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		_exit(!(self->mem[0] == WRITTEN &&
			is_pattern(self, self->mem + page_size, NR_PAGES - 1)));
	}
	ASSERT_EQ(pid, waitpid(pid, NULL, 0));
	memcpy(&want, self->want, sizeof(want));
	errno = 0;
	word = ptrace(PTRACE_PEEKDATA, pid, self->mem, 0);
	EXPECT_EQ(0, errno);
	EXPECT_EQ(want, word);
	memset(&word, WRITTEN, sizeof(word));
	EXPECT_EQ(0, ptrace(PTRACE_POKEDATA, pid, self->mem, word));
	EXPECT_EQ(0, ptrace(PTRACE_CONT, pid, 0, 0));
	EXPECT_EQ(0, exit_of(pid));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));
}

/* The pipe has the reference page itself. Nothing may change it there. */
TEST_F(refpage, vmsplice)
{
	struct iovec vec = { .iov_base = self->mem, .iov_len = 2 * page_size };
	unsigned char *buffer = malloc(2 * page_size);
	int ends[2];

	ASSERT_NE(buffer, NULL);
	ASSERT_EQ(0, pipe(ends));
	ASSERT_EQ((ssize_t)(2 * page_size), vmsplice(ends[1], &vec, 1, 0));
	memset(self->mem, WRITTEN, self->size);
	munmap(self->mem, self->size);
	self->mem = MAP_FAILED;
	close(self->fd);
	ASSERT_EQ((ssize_t)page_size, read(ends[0], buffer, page_size));
	ASSERT_EQ((ssize_t)page_size,
		  read(ends[0], buffer + page_size, page_size));
	EXPECT_TRUE(is_pattern(self, buffer, 2));
	close(ends[0]);
	close(ends[1]);
	free(buffer);
}

/* Who holds a page for long sees what is written there later. */
static void longterm_pin(struct __test_metadata *_metadata,
			 FIXTURE_DATA(refpage) * self, bool fast)
{
	struct pin_longterm_test args = {
		.addr = (uintptr_t)self->mem,
		.size = self->size,
		.flags = fast ? PIN_LONGTERM_FLAG_FAST : 0,
	};
	uint64_t addr;
	unsigned char *buffer;
	size_t i;
	int fd;

	fd = open("/sys/kernel/debug/gup_test", O_RDWR);
	if (fd < 0)
		SKIP(return, "no gup_test");

	touch_all(self->mem, NR_PAGES / 2);
	ASSERT_EQ(0, ioctl(fd, PIN_LONGTERM_TEST_START, &args));
	for (i = 0; i < NR_PAGES; i++)
		EXPECT_TRUE(is_anon(self, self->mem + i * page_size));
	EXPECT_TRUE(is_pattern(self, self->mem, NR_PAGES));

	buffer = malloc(self->size);
	ASSERT_NE(buffer, NULL);
	addr = (uintptr_t)buffer;
	memset(self->mem, WRITTEN, self->size);
	ASSERT_EQ(0, ioctl(fd, PIN_LONGTERM_TEST_READ, &addr));
	EXPECT_EQ(0, memcmp(buffer, self->mem, self->size));
	ASSERT_EQ(0, ioctl(fd, PIN_LONGTERM_TEST_STOP));
	free(buffer);
	close(fd);
}

TEST_F(refpage, longterm_pin)
{
	longterm_pin(_metadata, self, false);
}

TEST_F(refpage, longterm_pin_fast)
{
	longterm_pin(_metadata, self, true);
}

struct uffd_job {
	int uffd;
	size_t seen;
	unsigned char *mem;
	size_t size;
};

/* Lets each write through that it is told of. */
static void *uffd_thread(void *arg)
{
	struct uffd_job *job = arg;

	for (;;) {
		struct pollfd fds = { .fd = job->uffd, .events = POLLIN };
		struct uffdio_writeprotect lift = { 0 };
		struct uffd_msg msg;

		if (poll(&fds, 1, 10000) != 1 ||
		    read(job->uffd, &msg, sizeof(msg)) != sizeof(msg))
			return NULL;
		if (msg.event != UFFD_EVENT_PAGEFAULT ||
		    !(msg.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP))
			return NULL;
		lift.range.start = msg.arg.pagefault.address & ~(page_size - 1);
		lift.range.len = page_size;
		job->seen++;
		if (ioctl(job->uffd, UFFDIO_WRITEPROTECT, &lift))
			return NULL;
		if (lift.range.start == (uintptr_t)job->mem + job->size - page_size)
			return job;
	}
}

TEST_F(refpage, userfaultfd_wp)
{
	struct uffdio_api api = {
		.api = UFFD_API,
		.features = UFFD_FEATURE_PAGEFAULT_FLAG_WP |
			    UFFD_FEATURE_WP_HUGETLBFS_SHMEM |
			    UFFD_FEATURE_RWP,
	};
	struct uffdio_register reg = {
		.range = { (uintptr_t)self->mem, self->size },
	};
	struct uffdio_writeprotect protect = {
		.range = { (uintptr_t)self->mem, self->size },
		.mode = UFFDIO_WRITEPROTECT_MODE_WP,
	};
	struct uffd_job job = { .mem = self->mem, .size = self->size };
	pthread_t thread;
	void *done;
	size_t i;

	job.uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (job.uffd >= 0 && ioctl(job.uffd, UFFDIO_API, &api)) {
		/* Reads cannot be tracked in any mapping, which hides that they cannot here. */
		TH_LOG("no UFFD_FEATURE_RWP");
		api.api = UFFD_API;
		api.features = UFFD_FEATURE_PAGEFAULT_FLAG_WP |
			       UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
		if (ioctl(job.uffd, UFFDIO_API, &api)) {
			close(job.uffd);
			job.uffd = -1;
		}
	}
	if (job.uffd < 0)
		SKIP(return, "no userfaultfd write protection of files");

	reg.mode = UFFDIO_REGISTER_MODE_MISSING;
	EXPECT_EQ(-1, ioctl(job.uffd, UFFDIO_REGISTER, &reg));
	EXPECT_EQ(EINVAL, errno);
	reg.mode = UFFDIO_REGISTER_MODE_RWP;
	EXPECT_EQ(-1, ioctl(job.uffd, UFFDIO_REGISTER, &reg));
	EXPECT_EQ(EINVAL, errno);
	reg.mode = UFFDIO_REGISTER_MODE_WP;
	ASSERT_EQ(0, ioctl(job.uffd, UFFDIO_REGISTER, &reg));

	/* Some written, some read, some untouched when it begins. */
	for (i = 0; i < NR_PAGES; i += 3)
		self->mem[i * page_size] = 0x5b;
	for (i = 1; i < NR_PAGES; i += 3)
		touch_all(self->mem + i * page_size, 1);
	ASSERT_EQ(0, ioctl(job.uffd, UFFDIO_WRITEPROTECT, &protect));
	/* Reads are no events, and do not lift the protection. */
	touch_all(self->mem, NR_PAGES);

	ASSERT_EQ(0, pthread_create(&thread, NULL, uffd_thread, &job));
	for (i = 0; i < NR_PAGES; i++)
		self->mem[i * page_size] = WRITTEN;
	ASSERT_EQ(0, pthread_join(thread, &done));
	EXPECT_NE(NULL, done);
	EXPECT_EQ(NR_PAGES, job.seen);
	for (i = 0; i < NR_PAGES; i++)
		EXPECT_TRUE(is_written(self, self->mem + i * page_size, 0));
	close(job.uffd);
}

/*
 * What others are told
 */

TEST_F(refpage, smaps)
{
	const long kb = page_size / 1024;

	EXPECT_EQ(0, smaps_of(self->mem, "Rss"));
	touch_all(self->mem, 8);
	EXPECT_EQ(8 * kb, smaps_of(self->mem, "Rss"));
	EXPECT_EQ(0, smaps_of(self->mem, "Anonymous"));
	/* One page, at eight places. */
	EXPECT_LE(smaps_of(self->mem, "Pss"), kb + 1);
	memset(self->mem, WRITTEN, 3 * page_size);
	EXPECT_EQ(8 * kb, smaps_of(self->mem, "Rss"));
	EXPECT_EQ(3 * kb, smaps_of(self->mem, "Anonymous"));
	EXPECT_EQ(0, smaps_of(self->mem, "Swap"));
	ASSERT_EQ(0, madvise(self->mem, self->size, MADV_DONTNEED));
	EXPECT_EQ(0, smaps_of(self->mem, "Rss"));
}

#define CORE_PATTERN "/proc/sys/kernel/core_pattern"

/* Has a child map @size, write two pages, read some, and die; the core's blocks. */
static long core_blocks(FIXTURE_DATA(refpage) * self, const char *filter, size_t size,
			char *path, size_t path_size)
{
	struct stat st;
	pid_t pid = fork();

	if (!pid) {
		struct rlimit any = { RLIM_INFINITY, RLIM_INFINITY };
		unsigned char *mem;

		setrlimit(RLIMIT_CORE, &any);
		if (!write_text("/proc/self/coredump_filter", filter))
			_exit(1);
		mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE,
			   self->fd, 0);
		if (mem == MAP_FAILED)
			_exit(1);
		memset(mem, WRITTEN, page_size);
		touch_all(mem, 64);
		memset(mem + size - page_size, WRITTEN, page_size);
		signal(SIGABRT, SIG_DFL);
		abort();
	}
	exit_of(pid);
	snprintf(path, path_size, "/tmp/refpage-core.%d", pid);
	if (stat(path, &st))
		return -1;

	return st.st_blocks;
}

/* How often the dump has a page full of @byte. */
static size_t pages_in_core(const char *path, unsigned char byte)
{
	unsigned char *page = malloc(page_size), *want = malloc(page_size);
	FILE *file = fopen(path, "r");
	size_t found = 0;

	memset(want, byte, page_size);
	while (file && fread(page, page_size, 1, file) == 1)
		found += !memcmp(page, want, page_size);
	if (file)
		fclose(file);
	free(page);
	free(want);

	return found;
}

TEST_F(refpage, core_dump)
{
	const size_t size = 64UL << 20;
	char old[256], path[64];
	long small, large;

	if (!read_text(CORE_PATTERN, old, sizeof(old)) ||
	    !write_text(CORE_PATTERN, "/tmp/refpage-core.%p"))
		SKIP(return, "not allowed to say where core dumps go");

	/* Anonymous private memory: what was written, and holes. */
	small = core_blocks(self, "0x1", size, path, sizeof(path));
	if (small >= 0) {
		EXPECT_LT(small * 512, 4 << 20);
		EXPECT_EQ(2, pages_in_core(path, WRITTEN));
		unlink(path);
		/* Private files as well: everything. */
		large = core_blocks(self, "0x5", size / 8, path, sizeof(path));
		EXPECT_GE(large, 0);
		/* Zeros need no blocks, whether they are dumped or not. */
		if (variant->size != 1 || variant->bytes[0])
			EXPECT_GT(large * 512, (long)(size / 8));
		unlink(path);
	}
	write_text(CORE_PATTERN, old);
	if (small < 0)
		SKIP(return, "no core dump was written");
}

/* The page is the creator's, in his memory cgroup. */
TEST_F(refpage, memcg)
{
	char dir[] = "/tmp/refpage-cgroup.XXXXXX";
	char group[64], file[96], text[32];
	const int nr = 512;
	bool mounted;
	pid_t pid;

	if (!mkdtemp(dir))
		SKIP(return, "no place to mount cgroups");
	mounted = !mount("none", dir, "cgroup2", 0, NULL);
	snprintf(file, sizeof(file), "%s/cgroup.subtree_control", dir);
	if (!mounted || !write_text(file, "+memory")) {
		if (mounted)
			umount(dir);
		rmdir(dir);
		SKIP(return, "no memory cgroups, or not allowed");
	}
	snprintf(group, sizeof(group), "%s/refpage-test", dir);
	mkdir(group, 0700);
	snprintf(file, sizeof(file), "%s/cgroup.procs", group);

	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		struct rlimit many = { 2 * nr, 2 * nr };
		char stat[96];
		int i;

		setrlimit(RLIMIT_NOFILE, &many);
		snprintf(text, sizeof(text), "%d", getpid());
		if (!write_text(file, text))
			_exit(1);
		for (i = 0; i < nr; i++)
			if (refpage_create(self->want, page_size, 0) < 0)
				_exit(2);
		snprintf(stat, sizeof(stat), "%s/memory.stat", group);
		_exit(number_in(stat, "kernel") >= (long)(nr * page_size) ? 0 : 3);
	}
	EXPECT_EQ(0, exit_of(pid));
	rmdir(group);
	umount(dir);
	rmdir(dir);
}

/*
 * No page is mapped so often that its counters overflow. Needs a kernel that was
 * booted with a small refpage.max_refs, and root.
 */
TEST_F(refpage, many_references)
{
	long max_refs = number_in("/sys/module/refpage/parameters/max_refs", "");
	size_t pages, i, pfns = 0;
	uint64_t pfn[64];
	size_t times[64] = { 0 };
	unsigned char *mem;
	int round;
	pid_t pid;

	if (max_refs < 0 || max_refs > 4096)
		SKIP(return, "one page can be mapped %ld times", max_refs);

	pages = 8 * max_refs;
	mem = mmap(NULL, pages * page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE,
		   self->fd, 0);
	ASSERT_NE(mem, MAP_FAILED);
	EXPECT_TRUE(is_pattern(self, mem, pages));
	for (i = 0; i < pages; i++) {
		uint64_t this = pagemap_of(self, mem + i * page_size) & PM_PFN;
		size_t j;

		for (j = 0; j < pfns && pfn[j] != this; j++)
			;
		ASSERT_LT(j, ARRAY_SIZE(pfn));
		if (j == pfns)
			pfn[pfns++] = this;
		times[j]++;
	}
	if (pfns == 1 && !pfn[0])
		SKIP(return, "not allowed to see page frame numbers");
	EXPECT_GE(pfns, 8);
	for (i = 0; i < pfns; i++)
		EXPECT_LE(times[i], max_refs);

	/* With an anonymous page among them, fork() goes through the mapping. */
	mem[0] = WRITTEN;
	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		bool none;

		/* The descriptor is for the parent's. */
		self->pagemap = open("/proc/self/pagemap", O_RDONLY);
		none = !(pagemap_of(self, mem + page_size) & PM_PRESENT);
		_exit(!(none && is_written(self, mem, 0) &&
			is_pattern(self, mem + page_size, pages - 1)));
	}
	EXPECT_EQ(0, exit_of(pid));

	/* The child had pages of its own. All that are not mapped are used again. */
	for (round = 0; round < 4; round++) {
		ASSERT_EQ(0, madvise(mem, pages * page_size, MADV_DONTNEED));
		EXPECT_TRUE(is_pattern(self, mem, pages));
		for (i = 0; i < pages; i++) {
			uint64_t this = pagemap_of(self, mem + i * page_size) & PM_PFN;
			size_t j;

			for (j = 0; j < pfns && pfn[j] != this; j++)
				;
			if (j == pfns && pfns < ARRAY_SIZE(pfn))
				pfn[pfns++] = this;
		}
	}
	EXPECT_LE(pfns, 20);
	munmap(mem, pages * page_size);
}

/*
 * All at once
 */

#define RACE_SECONDS	3
#define RACE_AT		100	/* the only byte of a page that anybody writes */

struct race {
	FIXTURE_DATA(refpage) * self;
	volatile bool stop;
	volatile size_t bad;
};

static bool race_page_fine(struct race *race, const unsigned char *page)
{
	const unsigned char *want = race->self->want;
	const volatile unsigned char *byte = page + RACE_AT;
	unsigned char seen = *byte;

	return !memcmp(page, want, RACE_AT) &&
	       (seen == WRITTEN || seen == want[RACE_AT]) &&
	       !memcmp(page + RACE_AT + 1, want + RACE_AT + 1,
		       page_size - RACE_AT - 1);
}

static unsigned char *race_page(struct race *race, unsigned int *seed)
{
	return race->self->mem + rand_r(seed) % NR_PAGES * page_size;
}

static void *race_reader(void *arg)
{
	struct race *race = arg;
	unsigned int seed = 1;

	while (!race->stop)
		if (!race_page_fine(race, race_page(race, &seed)))
			race->bad++;

	return NULL;
}

static void *race_writer(void *arg)
{
	struct race *race = arg;
	unsigned int seed = 2;

	while (!race->stop)
		*(volatile unsigned char *)(race_page(race, &seed) + RACE_AT) = WRITTEN;

	return NULL;
}

static void *race_dropper(void *arg)
{
	struct race *race = arg;
	unsigned int seed = 3;

	while (!race->stop) {
		unsigned char *page = race_page(race, &seed);
		size_t left = race->self->mem + race->self->size - page;
		size_t size = (rand_r(&seed) % 8 + 1) * page_size;

		madvise(page, size < left ? size : left,
			rand_r(&seed) % 8 ? MADV_DONTNEED : MADV_PAGEOUT);
	}

	return NULL;
}

static void *race_mover(void *arg)
{
	struct race *race = arg;
	unsigned int seed = 4;

	while (!race->stop) {
		unsigned char *page = race_page(race, &seed);
		void *moved = mremap(page, page_size, page_size,
				     MREMAP_MAYMOVE | MREMAP_DONTUNMAP);

		if (moved == MAP_FAILED) {
			race->bad++;
			continue;
		}
		if (!race_page_fine(race, moved))
			race->bad++;
		munmap(moved, page_size);
	}

	return NULL;
}

static void *race_forker(void *arg)
{
	struct race *race = arg;

	while (!race->stop) {
		pid_t pid = fork();
		size_t i;

		if (pid < 0)
			continue;
		if (!pid) {
			for (i = 0; i < NR_PAGES; i++) {
				unsigned char *page = race->self->mem + i * page_size;

				if (!race_page_fine(race, page))
					_exit(1);
				page[RACE_AT] = WRITTEN;
				if (!race_page_fine(race, page))
					_exit(1);
			}
			_exit(0);
		}
		if (exit_of(pid))
			race->bad++;
	}

	return NULL;
}

TEST_F_TIMEOUT(refpage, race, 60)
{
	static void *(*const jobs[])(void *) = {
		race_reader, race_reader, race_writer, race_dropper, race_mover,
		race_forker,
	};
	struct race race = { .self = self };
	pthread_t threads[ARRAY_SIZE(jobs)];
	size_t i;

	for (i = 0; i < ARRAY_SIZE(jobs); i++)
		ASSERT_EQ(0, pthread_create(&threads[i], NULL, jobs[i], &race));
	sleep(RACE_SECONDS);
	race.stop = true;
	for (i = 0; i < ARRAY_SIZE(jobs); i++)
		pthread_join(threads[i], NULL);
	EXPECT_EQ(0, race.bad);
}

/*
 * Memory tags of arm64. User space is not checked for them but where a test says so,
 * so that it can look at the content with any pointer.
 */

#define GRANULE		16
#define NR_TAGGED	8	/* pages */

#ifdef __aarch64__

#ifndef HWCAP2_MTE
#define HWCAP2_MTE	(1 << 18)
#endif
#ifndef PROT_MTE
#define PROT_MTE	0x20
#endif
#ifndef PTRACE_PEEKMTETAGS
#define PTRACE_PEEKMTETAGS	33
#define PTRACE_POKEMTETAGS	34
#endif

static bool has_mte(void)
{
	return getauxval(AT_HWCAP2) & HWCAP2_MTE;
}

/* What a load through the returned pointer is checked against. */
static void *with_tag(const void *mem, unsigned int tag)
{
	return (void *)(((uintptr_t)mem & ~(0xfUL << 56)) | (uintptr_t)tag << 56);
}

static unsigned int tag_at(const void *mem)
{
	uintptr_t found = (uintptr_t)mem;

	asm volatile(".arch armv8.5-a+memtag\n"
		     "ldg %0, [%0]" : "+r" (found) : : "memory");

	return found >> 56 & 0xf;
}

static void set_tag(void *mem, unsigned int tag)
{
	asm volatile(".arch armv8.5-a+memtag\n"
		     "stg %0, [%0]" : : "r" (with_tag(mem, tag)) : "memory");
}

#else /* !__aarch64__ */

#define PROT_MTE		0
#define PTRACE_PEEKMTETAGS	0
#define PTRACE_POKEMTETAGS	0

static bool has_mte(void)
{
	return false;
}

static void *with_tag(const void *mem, unsigned int tag)
{
	return (void *)mem;
}

static unsigned int tag_at(const void *mem)
{
	return 0;
}

static void set_tag(void *mem, unsigned int tag)
{
}

#endif /* !__aarch64__ */

#ifndef PR_SET_TAGGED_ADDR_CTRL
#define PR_SET_TAGGED_ADDR_CTRL	55
#define PR_TAGGED_ADDR_ENABLE	(1UL << 0)
#endif
#ifndef PR_MTE_TCF_SYNC
#define PR_MTE_TCF_SYNC		(1UL << 1)
#endif

static int use_tags(unsigned long checks)
{
	return prctl(PR_SET_TAGGED_ADDR_CTRL,
		     PR_TAGGED_ADDR_ENABLE | checks | 0xfffeUL << 3, 0, 0, 0);
}

FIXTURE(mte)
{
	FIXTURE_DATA(refpage) page;	/* for is_pattern() and the like */
	unsigned char *content;		/* two pages with PROT_MTE */
	unsigned char *want_tags;	/* of a page */
	size_t granules;
};

FIXTURE_VARIANT(mte)
{
	unsigned char byte;
	bool bytes_differ;
	unsigned char tag;
	bool tags_differ;
	size_t size;			/* 0: a page */
};

/* One tag and zeros, which the kernel makes at once. */
FIXTURE_VARIANT_ADD(mte, zero) { .tag = 5 };
FIXTURE_VARIANT_ADD(mte, zero_granule) { .tag = 15, .size = GRANULE };
FIXTURE_VARIANT_ADD(mte, zero_tags_differ) { .tag = 1, .tags_differ = true };
FIXTURE_VARIANT_ADD(mte, byte) { .byte = 0xaa, .tag = 7, .size = 4 * GRANULE };
FIXTURE_VARIANT_ADD(mte, page) { .bytes_differ = true, .tag = 9, .tags_differ = true };
/* Pages without tags, of which some can be known to be zero. */
FIXTURE_VARIANT_ADD(mte, zero_no_tag) { .tag = 0 };
FIXTURE_VARIANT_ADD(mte, page_no_tag) { .bytes_differ = true };
/* There is no tag for less than a granule. */
FIXTURE_VARIANT_ADD(mte, half_granule) { .byte = 0xaa, .tag = 3, .size = GRANULE / 2 };

static void *map_mte(FIXTURE_DATA(mte) * self, int prot)
{
	return mmap(NULL, NR_TAGGED * page_size, prot, MAP_PRIVATE, self->page.fd, 0);
}

FIXTURE_SETUP(mte)
{
	size_t i, size;

	page_size = sysconf(_SC_PAGESIZE);
	self->page.mem = MAP_FAILED;
	self->page.fd = self->page.pagemap = -1;
	self->content = MAP_FAILED;
	self->granules = page_size / GRANULE;
	if (!has_mte())
		SKIP(return, "no memory tags");
	ASSERT_EQ(0, use_tags(0));

	self->content = mmap(NULL, 2 * page_size, PROT_READ | PROT_WRITE | PROT_MTE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(self->content, MAP_FAILED);
	size = variant->size ?: page_size;
	for (i = 0; i < size; i++)
		self->content[i] = variant->bytes_differ ? (i * 7 + i / 256) & 0x3f :
							   variant->byte;
	for (i = 0; i < size; i += GRANULE)
		set_tag(self->content + i, variant->tags_differ ?
			(variant->tag + i / GRANULE) & 0xf : variant->tag);

	self->page.want = malloc(page_size);
	self->want_tags = malloc(self->granules);
	ASSERT_NE(self->page.want, NULL);
	ASSERT_NE(self->want_tags, NULL);
	for (i = 0; i < page_size; i++)
		self->page.want[i] = self->content[i % size];
	for (i = 0; i < self->granules; i++)
		self->want_tags[i] = size < GRANULE ? 0 :
				     tag_at(self->content + i * GRANULE % size);

	/* As a program has it whose heap is tagged. */
	self->page.fd = refpage_create(with_tag(self->content, variant->tag), size, 0);
	if (self->page.fd < 0 && errno == ENOSYS)
		SKIP(return, "no refpage_create() in this kernel");
	ASSERT_GE(self->page.fd, 0);
	self->page.size = NR_TAGGED * page_size;
	self->page.mem = map_mte(self, PROT_READ | PROT_WRITE | PROT_MTE);
	ASSERT_NE(self->page.mem, MAP_FAILED);
	self->page.pagemap = open("/proc/self/pagemap", O_RDONLY);
	ASSERT_GE(self->page.pagemap, 0);
}

FIXTURE_TEARDOWN(mte)
{
	if (self->page.mem != MAP_FAILED)
		munmap(self->page.mem, self->page.size);
	if (self->content != MAP_FAILED)
		munmap(self->content, 2 * page_size);
	close(self->page.pagemap);
	close(self->page.fd);
	free(self->page.want);
	free(self->want_tags);
}

/* Bytes and tags are those of the content. */
static bool is_tagged(FIXTURE_DATA(mte) * self, const unsigned char *mem, size_t pages)
{
	size_t i;

	for (i = 0; i < pages * self->granules; i++)
		if (tag_at(mem + i * GRANULE) != self->want_tags[i % self->granules])
			return false;

	return is_pattern(&self->page, mem, pages);
}

static bool tags_are(FIXTURE_DATA(mte) * self, const unsigned char *mem, size_t pages,
		     unsigned int tag)
{
	size_t i;

	for (i = 0; i < pages * self->granules; i++)
		if (tag_at(mem + i * GRANULE) != tag)
			return false;

	return true;
}

/* As is_tagged() for one page, with one byte that was written to. */
static bool is_tagged_and_written(FIXTURE_DATA(mte) * self, const unsigned char *page,
				  size_t at)
{
	size_t i;

	for (i = 0; i < self->granules; i++)
		if (tag_at(page + i * GRANULE) != self->want_tags[i])
			return false;

	return is_written(&self->page, page, at);
}

TEST_F(mte, reads)
{
	unsigned char *mem = self->page.mem;
	size_t i;

	/* The tag is what is read first. */
	EXPECT_EQ(self->want_tags[1], tag_at(mem + GRANULE));
	EXPECT_TRUE(is_tagged(self, mem, NR_TAGGED));
	for (i = 0; i < NR_TAGGED; i++)
		EXPECT_TRUE(is_reference(&self->page, mem + i * page_size));
}

TEST_F(mte, writes)
{
	unsigned char *mem = self->page.mem;
	size_t i;

	touch_all(mem, NR_TAGGED / 2);
	for (i = 0; i < NR_TAGGED; i += 2) {
		mem[i * page_size + 100] = WRITTEN;
		EXPECT_TRUE(is_anon(&self->page, mem + i * page_size));
		EXPECT_TRUE(is_tagged_and_written(self, mem + i * page_size, 100));
		EXPECT_TRUE(is_tagged(self, mem + (i + 1) * page_size, 1));
	}
}

/* To set a tag is to write. */
TEST_F(mte, tag_writes)
{
	unsigned char *mem = self->page.mem, *other;
	size_t i;

	other = map_mte(self, PROT_READ | PROT_WRITE | PROT_MTE);
	ASSERT_NE(other, MAP_FAILED);
	touch_all(mem, NR_TAGGED / 2);
	for (i = 0; i < NR_TAGGED; i += 2) {
		unsigned char *page = mem + i * page_size;

		set_tag(page + GRANULE, self->want_tags[1] ^ 8);
		EXPECT_TRUE(is_anon(&self->page, page));
		EXPECT_EQ(self->want_tags[1] ^ 8, tag_at(page + GRANULE));
		EXPECT_TRUE(is_pattern(&self->page, page, 1));
		set_tag(page + GRANULE, self->want_tags[1]);
		EXPECT_TRUE(is_tagged(self, page, 2));
	}
	EXPECT_TRUE(is_tagged(self, other, NR_TAGGED));
	munmap(other, NR_TAGGED * page_size);
}

/* How a child ends that is checked, and reads a byte through a pointer with @tag. */
static int checked_read(const unsigned char *mem, unsigned int tag)
{
	pid_t pid = fork();

	if (!pid) {
		signal(SIGSEGV, SIG_DFL);
		if (use_tags(PR_MTE_TCF_SYNC))
			_exit(1);
		(void)*(const volatile unsigned char *)with_tag(mem, tag);
		_exit(0);
	}

	return exit_of(pid);
}

TEST_F(mte, checks)
{
	unsigned char *mem = self->page.mem, *plain;
	const unsigned int tag = self->want_tags[2];

	mem[page_size + 2 * GRANULE + 1] = WRITTEN;
	EXPECT_EQ(0, checked_read(mem + 2 * GRANULE, tag));
	EXPECT_EQ(256 + SIGSEGV, checked_read(mem + 2 * GRANULE, tag ^ 1));
	EXPECT_EQ(0, checked_read(mem + page_size + 2 * GRANULE, tag));
	EXPECT_EQ(256 + SIGSEGV, checked_read(mem + page_size + 2 * GRANULE, tag ^ 1));

	/* Who does not ask for tags does not get them. */
	plain = map_mte(self, PROT_READ | PROT_WRITE);
	ASSERT_NE(plain, MAP_FAILED);
	plain[page_size + 1] = WRITTEN;
	EXPECT_EQ(0, checked_read(plain, 0));
	EXPECT_EQ(0, checked_read(plain, tag ^ 1));
	EXPECT_EQ(0, checked_read(plain + page_size, tag ^ 1));
	EXPECT_TRUE(tags_are(self, plain, NR_TAGGED, 0));
	munmap(plain, NR_TAGGED * page_size);
}

/* Tags are asked for when some pages have been read, and some written. */
TEST_F(mte, mprotect)
{
	unsigned char *mem = map_mte(self, PROT_READ | PROT_WRITE);
	size_t i;

	ASSERT_NE(mem, MAP_FAILED);
	touch_all(mem, 4);
	mem[100] = WRITTEN;
	mem[4 * page_size + 100] = WRITTEN;
	/* Others are left untouched. */
	EXPECT_TRUE(tags_are(self, mem, NR_TAGGED - 2, 0));
	ASSERT_EQ(0, mprotect(mem, NR_TAGGED * page_size,
			      PROT_READ | PROT_WRITE | PROT_MTE));
	for (i = 0; i < NR_TAGGED; i++) {
		const unsigned char *page = mem + i * page_size;

		EXPECT_TRUE(i % 4 ? is_tagged(self, page, 1) :
				    is_tagged_and_written(self, page, 100));
	}
	munmap(mem, NR_TAGGED * page_size);

	EXPECT_EQ(MAP_FAILED, mmap(NULL, page_size, PROT_READ | PROT_MTE, MAP_SHARED,
				   self->page.fd, 0));
	EXPECT_EQ(EINVAL, errno);
}

TEST_F(mte, dontneed)
{
	unsigned char *mem = self->page.mem;
	size_t i;

	for (i = 0; i < NR_TAGGED * self->granules; i++)
		set_tag(mem + i * GRANULE, 2);
	memset(mem, WRITTEN, self->page.size);
	EXPECT_TRUE(tags_are(self, mem, NR_TAGGED, 2));
	ASSERT_EQ(0, madvise(mem, self->page.size, MADV_DONTNEED));
	mem[page_size] = WRITTEN;
	EXPECT_TRUE(is_tagged(self, mem, 1));
	EXPECT_TRUE(is_tagged_and_written(self, mem + page_size, 0));
	EXPECT_TRUE(is_tagged(self, mem + 2 * page_size, NR_TAGGED - 2));
}

TEST_F(mte, fork)
{
	unsigned char *mem = self->page.mem;
	pid_t pid;

	mem[100] = WRITTEN;
	touch_all(mem, 2);
	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		bool fine = is_tagged_and_written(self, mem, 100) &&
			    is_tagged(self, mem + page_size, NR_TAGGED - 1);

		/* Copied on write, and first written: both bring the tags along. */
		mem[100] = WRITTEN;
		mem[page_size + 100] = WRITTEN;
		fine = fine && is_tagged_and_written(self, mem, 100) &&
		       is_tagged_and_written(self, mem + page_size, 100);
		set_tag(mem, 6);
		set_tag(mem + page_size, 6);
		_exit(!fine);
	}
	EXPECT_EQ(0, exit_of(pid));
	EXPECT_TRUE(is_tagged_and_written(self, mem, 100));
	EXPECT_TRUE(is_tagged(self, mem + page_size, NR_TAGGED - 1));
}

TEST_F(mte, mremap)
{
	unsigned char *mem = self->page.mem, *moved;

	mem[100] = WRITTEN;
	touch_all(mem, 2);
	moved = mremap(mem, self->page.size, self->page.size,
		       MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
	ASSERT_NE(moved, MAP_FAILED);
	EXPECT_TRUE(is_tagged_and_written(self, moved, 100));
	EXPECT_TRUE(is_tagged(self, moved + page_size, NR_TAGGED - 1));
	EXPECT_TRUE(is_tagged(self, mem, NR_TAGGED));
	munmap(moved, self->page.size);
}

TEST_F(mte, swap)
{
	unsigned char *mem = self->page.mem;
	size_t i, swapped = 0;

	if (!has_swap())
		SKIP(return, "no swap");

	/* The first half becomes private without that a byte changes. */
	ASSERT_EQ(0, madvise(mem, self->page.size / 2, MADV_POPULATE_WRITE));
	for (i = NR_TAGGED / 2; i < NR_TAGGED; i++)
		mem[i * page_size + i] = WRITTEN;
	ASSERT_EQ(0, madvise(mem, self->page.size, MADV_PAGEOUT));
	for (i = 0; i < NR_TAGGED; i++)
		swapped += !!(pagemap_of(&self->page, mem + i * page_size) & PM_SWAP);
	EXPECT_TRUE(swapped);
	EXPECT_TRUE(is_tagged(self, mem, NR_TAGGED / 2));
	for (i = NR_TAGGED / 2; i < NR_TAGGED; i++)
		EXPECT_TRUE(is_tagged_and_written(self, mem + i * page_size, i));
}

/* KSM leaves pages with tags alone, and zeros with tags are not the zero page. */
TEST_F(mte, ksm)
{
	char old_run[16], old_scan[16];
	unsigned char *mem = self->page.mem;
	long scans;
	size_t i;

	if (!read_text(KSM_DIR "run", old_run, sizeof(old_run)) ||
	    !read_text(KSM_DIR "pages_to_scan", old_scan, sizeof(old_scan)) ||
	    !write_text(KSM_DIR "pages_to_scan", "1000"))
		SKIP(return, "no KSM, or not allowed");

	write_text(KSM_DIR "use_zero_pages", "1");
	ASSERT_EQ(0, madvise(mem, self->page.size / 2, MADV_POPULATE_WRITE));
	touch_all(mem, NR_TAGGED);
	ASSERT_EQ(0, madvise(mem, self->page.size, MADV_MERGEABLE));
	scans = number_in(KSM_DIR "full_scans", "");
	write_text(KSM_DIR "run", "1");
	for (i = 0; i < 100 && number_in(KSM_DIR "full_scans", "") < scans + 4; i++)
		usleep(50000);
	EXPECT_TRUE(is_tagged(self, mem, NR_TAGGED));
	write_text(KSM_DIR "run", "2");
	write_text(KSM_DIR "use_zero_pages", "0");
	write_text(KSM_DIR "run", old_run);
	write_text(KSM_DIR "pages_to_scan", old_scan);
}

/* A debugger reads the tags of what nobody touched, and writes to a copy. */
TEST_F(mte, ptrace)
{
	unsigned char *mem = self->page.mem;
	unsigned char tags[2] = { 0x5b, 0x5b };
	struct iovec vec = { .iov_base = tags, .iov_len = 2 };
	pid_t pid;

	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		_exit(!(tag_at(mem) == 4 && tag_at(mem + GRANULE) == 4 &&
			is_pattern(&self->page, mem, 1) &&
			is_tagged(self, mem + page_size, NR_TAGGED - 1)));
	}
	ASSERT_EQ(pid, waitpid(pid, NULL, 0));
	EXPECT_EQ(0, ptrace(PTRACE_PEEKMTETAGS, pid, mem, &vec));
	EXPECT_EQ(2, vec.iov_len);
	EXPECT_EQ(self->want_tags[0], tags[0]);
	EXPECT_EQ(self->want_tags[1], tags[1]);
	tags[0] = tags[1] = 4;
	EXPECT_EQ(0, ptrace(PTRACE_POKEMTETAGS, pid, mem, &vec));
	EXPECT_EQ(0, ptrace(PTRACE_CONT, pid, 0, 0));
	EXPECT_EQ(0, exit_of(pid));
	EXPECT_TRUE(is_tagged(self, mem, NR_TAGGED));
}

/* The tags that a file has which was made of @size bytes at @content. */
static bool tags_of_file(FIXTURE_DATA(mte) * self, const unsigned char *content,
			 size_t size, unsigned char *tags)
{
	int fd = refpage_create(content, size, 0);
	unsigned char *mem;
	size_t i;

	if (fd < 0)
		return false;
	mem = mmap(NULL, page_size, PROT_READ | PROT_MTE, MAP_PRIVATE, fd, 0);
	close(fd);
	if (mem == MAP_FAILED)
		return false;
	for (i = 0; i < self->granules; i++)
		tags[i] = tag_at(mem + i * GRANULE);
	munmap(mem, page_size);

	return true;
}

/* Not aligned: each granule has the tag of the first of its bytes. */
TEST_F(mte, unaligned_content)
{
	const size_t sizes[] = { GRANULE, 4 * GRANULE, page_size };
	unsigned char *tags = malloc(self->granules);
	size_t i, j;

	ASSERT_NE(tags, NULL);
	for (i = 0; i < 2 * self->granules; i++)
		set_tag(self->content + i * GRANULE, i & 0xf);
	for (i = 0; i < ARRAY_SIZE(sizes); i++) {
		/* Partly in either page. */
		unsigned char *from = self->content + page_size - 2 * GRANULE + 9;

		ASSERT_TRUE(tags_of_file(self, from, sizes[i], tags));
		for (j = 0; j < self->granules; j++)
			EXPECT_EQ(tag_at(from + j * GRANULE % sizes[i]), tags[j]);
	}
	/* Where it ends, nothing is read. */
	ASSERT_EQ(0, mprotect(self->content + page_size, page_size, PROT_NONE));
	ASSERT_TRUE(tags_of_file(self, self->content + page_size - GRANULE, GRANULE, tags));
	EXPECT_EQ((self->granules - 1) & 0xf, tags[0]);
	EXPECT_FALSE(tags_of_file(self, self->content + page_size - GRANULE, 2 * GRANULE,
				  tags));
	EXPECT_EQ(EFAULT, errno);
	free(tags);
}

/* Whose mapping does not show the tags of a page cannot see them this way, either. */
TEST_F(mte, hidden_tags)
{
	unsigned char *shown, *hidden, *tags = malloc(self->granules);
	size_t i;
	int fd;

	ASSERT_NE(tags, NULL);
	fd = memfd_create("refpage-test", MFD_CLOEXEC);
	ASSERT_GE(fd, 0);
	ASSERT_EQ(0, ftruncate(fd, page_size));
	shown = mmap(NULL, page_size, PROT_READ | PROT_WRITE | PROT_MTE, MAP_SHARED,
		     fd, 0);
	hidden = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_NE(shown, MAP_FAILED);
	ASSERT_NE(hidden, MAP_FAILED);
	close(fd);
	for (i = 0; i < self->granules; i++)
		set_tag(shown + i * GRANULE, 9);

	ASSERT_TRUE(tags_of_file(self, shown, page_size, tags));
	for (i = 0; i < self->granules; i++)
		EXPECT_EQ(9, tags[i]);
	ASSERT_TRUE(tags_of_file(self, hidden, page_size, tags));
	for (i = 0; i < self->granules; i++)
		EXPECT_EQ(0, tags[i]);
	munmap(shown, page_size);
	munmap(hidden, page_size);
	free(tags);
}

TEST_HARNESS_MAIN
