// SPDX-License-Identifier: GPL-2.0
/*
 * late_zeros: uses memory through a caller that zeroes it after the allocation, reads all of it,
 * and prints what the page allocator has counted.
 */
#include "common.h"

#include <linux/udmabuf.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define PAGE 4096UL

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static const char usage[] =
"usage: late_zeros [options] KIND\n"
"Prints one JSON line: the counters of known-zero memory, and the pages that are not as they\n"
"must be.\n"
"KIND: fallocate, tmpfs, byte_writes, full_writes, uffd, udmabuf, collapse (one page of a huge\n"
"      page exists), collapse_most (all but one do), collapse_full (all do), collapse_unwritten\n"
"      (of a file of which every second huge page is written), and collapse_refused, in a\n"
"      memory cgroup without room for a huge page\n"
"Options:\n"
"  --size MB    (default 128)\n"
"  --help       this text\n"
"Exit: 0 done, 1 memory has old content, 2 bad usage, 3 the machine cannot do it.\n";

static size_t size;

static void *map_file(int fd)
{
	void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (mem == MAP_FAILED)
		kz_fail("cannot map the file");
	return mem;
}

static int new_file(const char *folder, bool allocate)
{
	int fd = folder ? open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) :
			  memfd_create("late_zeros", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)size) || (allocate && fallocate(fd, 0, 0, (off_t)size)))
		kz_fail("a file of %zu MiB", size / KZ_MB);
	return fd;
}

static unsigned char *use_fallocate(void)
{
	return map_file(new_file(NULL, true));
}

static unsigned char *use_tmpfs(void)
{
	return map_file(new_file("/tmp", true));
}

static unsigned char *written(size_t len)
{
	int fd = new_file(NULL, false);
	char zeros[PAGE] = { 0 };
	size_t at;

	for (at = 0; at < size; at += PAGE)
		if (pwrite(fd, zeros, len, (off_t)at) != (ssize_t)len)
			kz_fail("pwrite");
	return map_file(fd);
}

static unsigned char *use_byte_writes(void)
{
	return written(1);
}

static unsigned char *use_full_writes(void)
{
	return written(PAGE);
}

static unsigned char *use_uffd(void)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = { .api = UFFD_API };
	unsigned char *mem = map_file(new_file(NULL, false));
	struct uffdio_register reg = {
		.range = { (uintptr_t)mem, size }, .mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	struct uffdio_zeropage zero = { .range = { (uintptr_t)mem, size } };

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &reg) ||
	    ioctl(fd, UFFDIO_ZEROPAGE, &zero))
		kz_fail("UFFDIO_ZEROPAGE");
	return mem;
}

/* Memory with a page at each multiple of @step. */
static unsigned char *small_pages(size_t step)
{
	unsigned char *mem = kz_map(size + KZ_HUGE, 0);
	size_t at;

	mem = (unsigned char *)(((uintptr_t)mem + KZ_HUGE - 1) & ~(KZ_HUGE - 1));
	if (madvise(mem, size, MADV_NOHUGEPAGE))
		kz_fail("MADV_NOHUGEPAGE");
	for (at = 0; at < size; at += step)
		*(volatile unsigned char *)(mem + at) = 0;
	if (madvise(mem, size, MADV_HUGEPAGE))
		kz_fail("MADV_HUGEPAGE");
	return mem;
}

static unsigned char *collapsed(size_t step)
{
	unsigned char *mem = small_pages(step);

	if (madvise(mem, size, MADV_COLLAPSE))
		kz_fail("MADV_COLLAPSE");
	return mem;
}

static unsigned char *use_collapse(void)
{
	return collapsed(KZ_HUGE);
}

static unsigned char *use_collapse_full(void)
{
	return collapsed(PAGE);
}

static unsigned char *use_collapse_most(void)
{
	unsigned char *mem = small_pages(PAGE);
	size_t at;

	for (at = 0; at < size; at += KZ_HUGE)
		if (madvise(mem + at, PAGE, MADV_DONTNEED))
			kz_fail("MADV_DONTNEED");
	if (madvise(mem, size, MADV_COLLAPSE))
		kz_fail("MADV_COLLAPSE");
	return mem;
}

static long faults(void)
{
	struct rusage usage;

	if (getrusage(RUSAGE_SELF, &usage))
		kz_fail("getrusage");
	return usage.ru_minflt;
}

/* Huge folios of a file, allocated; every second one is written. */
static unsigned char *use_collapse_unwritten(void)
{
	int fd = new_file(NULL, true);
	unsigned char *mem = kz_map(size + KZ_HUGE, 0);
	size_t at;
	long before;

	for (at = KZ_HUGE; at < size; at += 2 * KZ_HUGE)
		if (pwrite(fd, "", 1, (off_t)at) != 1)
			kz_fail("pwrite");
	mem = (unsigned char *)(((uintptr_t)mem + KZ_HUGE - 1) & ~(KZ_HUGE - 1));
	if (mmap(mem, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		kz_fail("cannot map the file");
	madvise(mem, size, MADV_COLLAPSE);	/* fails, but maps what is written */
	before = faults();
	for (at = KZ_HUGE; at < size; at += 2 * KZ_HUGE)
		(void)*(volatile unsigned char *)(mem + at);
	if (faults() != before)
		kz_die(KZ_FAILED, "MADV_COLLAPSE did not map all that is written");
	return mem;
}

static unsigned char *use_collapse_refused(void)
{
	unsigned char *mem = small_pages(KZ_HUGE);
	size_t at;

	for (at = 0; at < size; at += KZ_HUGE)
		if (!madvise(mem + at, KZ_HUGE, MADV_COLLAPSE))
			kz_die(KZ_BROKEN, "there is room for a huge page");
	return mem;
}

/* A udmabuf pins a file that was allocated and not written, and shows it to a device or program. */
static unsigned char *use_udmabuf(void)
{
	struct udmabuf_create create = { .flags = UDMABUF_FLAGS_CLOEXEC, .size = size };
	int fd = new_file(NULL, true), dev = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);

	if (dev < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK))
		kz_fail("/dev/udmabuf");
	create.memfd = (uint32_t)fd;
	fd = ioctl(dev, UDMABUF_CREATE, &create);
	if (fd < 0)
		kz_fail("UDMABUF_CREATE");
	return map_file(fd);
}

static const struct {
	const char *name;
	unsigned char *(*use)(void);
} kinds[] = {
	{ "fallocate", use_fallocate }, { "tmpfs", use_tmpfs }, { "byte_writes", use_byte_writes },
	{ "full_writes", use_full_writes }, { "uffd", use_uffd }, { "collapse", use_collapse },
	{ "collapse_full", use_collapse_full }, { "collapse_most", use_collapse_most },
	{ "collapse_refused", use_collapse_refused },
	{ "collapse_unwritten", use_collapse_unwritten },
	{ "udmabuf", use_udmabuf },
};

int main(int argc, char **argv)
{
	unsigned long megabytes = 128, old = 0;
	const struct kz_option options[] = {
		{ "size", .number = &megabytes, .min = 2, .max = 1UL << 20 },
		{ 0 },
	};
	int first = kz_options(argc, argv, "late_zeros", usage, options);
	struct kz_vmstat before, after;
	unsigned char *mem;
	unsigned int i;
	size_t at;

	for (i = 0; argc == first + 1 && i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		if (strcmp(argv[first], kinds[i].name))
			continue;
		size = megabytes / 2 * KZ_HUGE;
		kz_vmstat_read(&before);
		mem = kinds[i].use();
		for (at = 0; at < size; at += PAGE)
			old += kz_first_nonzero(mem + at, PAGE) < PAGE;
		kz_vmstat_read(&after);
		printf("{\"kind\": \"%s\", \"pages\": %zu, \"old\": %lu, ", kinds[i].name, size / PAGE, old);
		kz_vmstat_print_delta(&before, &after);
		printf("}\n");
		return old ? KZ_FAILED : KZ_OK;
	}
	kz_die(KZ_USAGE, "one KIND is needed; see late_zeros --help");
}
