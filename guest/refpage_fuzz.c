// SPDX-License-Identifier: GPL-2.0
/*
 * refpage_fuzz: random system calls around refpage_create(2), and a model of the content of each page
 * of an area. System calls are made directly and nothing here allocates memory, so that libc
 * adds no mapping, no allocation and no fork of its own.
 *
 * Each step draws its choices from the seed and its own number only. Most calls get ranges over any
 * mixture of mappings, so many fail; after a failed call each page must be as it was, or as the
 * call would have left it.
 */
#include "refpage_model.h"

#include <linux/mman.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#ifndef __x86_64__
#error "the area is where x86_64 has nothing, and each protection can be read as on x86_64"
#endif
#ifndef SYS_refpage_create
#define SYS_refpage_create 473
#endif

/* Two pages with content for the calls; nothing is mapped after them. */
#define SOURCE (ARENA - 64 * PAGE)
#define NR_FILES 8
#define MAX_RUN 512UL
#define MAX_ERRNO 134
#define MAX_DEPTH 2
#define CASE(n, statement) case n: statement; break;
/* The model is wrong from this step on with --break-model. */
#define BREAK_STEP 50

/* Returns the result of a system call, or its error as a negative number. */
static long sys(long number, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f)
{
	long ret = syscall(number, a, b, c, d, e, f);

	return ret == -1 ? -errno : ret;
}

#define SYS_6(n, a, b, c, d, e, f, ...) \
	sys(SYS_##n, (uint64_t)(a), (uint64_t)(b), (uint64_t)(c), (uint64_t)(d), (uint64_t)(e), (uint64_t)(f))
#define SYS(...) SYS_6(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)

/* Counters of the parent and its children: operations by their error. */

/* Each with its weight. */
#define ADVICES(X) \
	X(DONTNEED, dontneed, 24) X(DONTNEED_LOCKED, dontneed_locked, 4) X(FREE, free, 5) \
	X(MERGEABLE, mergeable, 6) X(UNMERGEABLE, unmergeable, 3) X(HUGEPAGE, hugepage, 4) \
	X(NOHUGEPAGE, nohugepage, 2) X(COLLAPSE, collapse, 2) X(COLD, cold, 5) X(PAGEOUT, pageout, 12) \
	X(POPULATE_READ, populate_read, 6) X(POPULATE_WRITE, populate_write, 6) \
	X(DONTFORK, dontfork, 3) X(DOFORK, dofork, 3) X(WIPEONFORK, wipeonfork, 4) \
	X(KEEPONFORK, keeponfork, 2) X(REMOVE, remove, 5)
#define OPS(X) \
	X(refpage_create) X(mmap_refpage) X(mmap_other) X(munmap) X(mremap) X(mremap_bad) \
	X(mremap_dontunmap) X(mprotect) X(mlock) X(mlock2) X(munlock) X(mlockall) X(munlockall) X(fork) \
	X(load) X(store) X(process_vm_readv) X(process_vm_writev) X(write_from) X(read_into) \
	X(mem_read) X(mem_write) X(fd_read) X(fd_write) X(fd_pread) X(fd_pwrite) X(fd_fallocate) \
	X(fd_ftruncate) X(fd_lseek) X(fd_ioctl) X(fd_fcntl) X(fd_sendfile) X(fd_close) X(fd_dup)

#define ENUM(name) OP_##name,
#define ADVICE_ENUM(advice, name, weight) OP_madvise_##name,
#define NAME(name) #name,
#define ADVICE_NAME(advice, name, weight) "madvise_" #name,

enum op { OPS(ENUM) ADVICES(ADVICE_ENUM) NR_OPS };

static const char *const op_names[] = { OPS(NAME) ADVICES(ADVICE_NAME) };

static struct shared {
	uint64_t count[NR_OPS][MAX_ERRNO];
	uint64_t checked_pages, killed, violations;
} *shared;

static enum op current_op;

/* Counts a call; returns its error, positive, or 0. An address is no error. */
static int count(enum op op, long ret)
{
	int error = ret < 0 && ret > -4096 ? (int)-ret : 0;

	current_op = op;
	__atomic_add_fetch(&shared->count[op][error < MAX_ERRNO ? error : MAX_ERRNO - 1], 1,
			   __ATOMIC_RELAXED);
	return error;
}

static const struct page nothing;
static struct page *pages;
static struct {
	int fd;			/* -1: none */
	struct content content;
} files[NR_FILES];

/* Without --seconds, --steps is the exact number of steps. */
static unsigned long nr_pages = 1024, seed = 1, seconds, least_steps, step;
static int depth, scratch = -1;
/* Some mapping may be locked in memory. */
static bool locked;
static enum broken { INTACT, BREAK_CONTENT, BREAK_ACCESS, BREAK_ERRNO } break_model;

static bool broken(enum broken what)
{
	return break_model == what && step >= BREAK_STEP;
}

static void report(void)
{
	int op, error;

	printf("{\"seed\": %lu, \"seconds\": %lu, \"steps\": %lu, \"pages\": %lu, \"checked_pages\": %" PRIu64
	       ", \"children_killed\": %" PRIu64 ", \"violations\": %" PRIu64 ", \"operations\": {",
	       seed, seconds, step, nr_pages, shared->checked_pages, shared->killed, shared->violations);
	for EACH(op, NR_OPS) {
		const char *separator = "";

		printf("%s\"%s\": {", op ? ", " : "", op_names[op]);
		for EACH(error, MAX_ERRNO) {
			if (!shared->count[op][error])
				continue;
			printf("%s\"%s\": %" PRIu64, separator, error ? strerrorname_np(error) : "ok",
			       shared->count[op][error]);
			separator = ", ";
		}
		printf("}");
	}
	printf("}}\n");
	fflush(stdout);
}

static __attribute__((noreturn)) void leave(int code)
{
	if (code && !depth)
		report();
	_exit(code);
}

/* @index is that of a page, or ~0UL. */
static __attribute__((noreturn))
void violation(const char *what, unsigned long index, unsigned long offset, unsigned long found,
	       unsigned long expected)
{
	printf("{\"violation\": {\"what\": \"%s\", \"operation\": \"%s\", \"seed\": %lu, \"step\": %lu, "
	       "\"children_deep\": %d, \"pages\": %lu, \"page\": %ld, \"offset\": %lu, \"found\": %lu, "
	       "\"expected\": %lu", what, op_names[current_op], seed, step, depth, nr_pages, (long)index,
	       offset, found, expected);
	if (index < nr_pages)
		printf(", \"kind\": %u, \"prot\": %u, \"writes\": %u", pages[index].kind, pages[index].prot,
		       pages[index].nr_writes);
	printf("}}\n");
	fflush(stdout);
	__atomic_add_fetch(&shared->violations, 1, __ATOMIC_RELAXED);
	leave(KZ_FAILED);
}

/* A call that returned @found must be @good; otherwise an error of @expected was the right one. */
static void must_be(const char *what, bool good, long found, long expected)
{
	if (!good)
		violation(what, ~0UL, 0, (unsigned long)(found < 0 ? -found : 0), (unsigned long)expected);
}

/* Reading pages and comparing them with the model */

static sigjmp_buf copy_ends;
static volatile bool copying;

static bool copy_faults(void *to, const void *from, size_t size)
{
	if (sigsetjmp(copy_ends, 0))
		return true;
	copying = true;
	__asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
	copying = false;
	return false;
}

static void on_fault(int number, siginfo_t *info, void *context KZ_MAYBE_UNUSED)
{
	if (!copying)
		violation("crash", ~0UL, (unsigned long)info->si_addr, (unsigned long)number, 0);
	copying = false;
	siglongjmp(copy_ends, 1);
}

static unsigned char wanted[PAGE] __attribute__((aligned(16)));
static unsigned char got[PAGE] __attribute__((aligned(16)));

/* The ways to read and to write memory; they return the amount, or a negative error. */
static long transfer(enum op op, void *mine, void *at, size_t size)
{
	const unsigned long place = (unsigned long)depth * PAGE;
	struct iovec local = { mine, size }, remote = { at, size };
	long ret, fd, pid = SYS(getpid);

	switch (op) {
	case OP_process_vm_readv:
		return SYS(process_vm_readv, pid, &local, 1, &remote, 1, 0);
	case OP_process_vm_writev:
		return SYS(process_vm_writev, pid, &local, 1, &remote, 1, 0);
	case OP_write_from:
		ret = SYS(pwrite64, scratch, at, size, place);
		return ret == (long)size ? SYS(pread64, scratch, mine, size, place) : ret;
	case OP_read_into:
		ret = SYS(pwrite64, scratch, mine, size, place);
		return ret == (long)size ? SYS(pread64, scratch, at, size, place) : -ENOSPC;
	case OP_mem_read:
	case OP_mem_write:
		fd = SYS(open, "/proc/self/mem", O_RDWR | O_CLOEXEC);
		if (fd < 0)
			return fd;
		ret = op == OP_mem_read ? SYS(pread64, fd, mine, size, at) : SYS(pwrite64, fd, mine, size, at);
		SYS(close, fd);
		return ret;
	case OP_store:
		return copy_faults(at, mine, size) ? -EFAULT : (long)size;
	default:
		return copy_faults(mine, at, size) ? -EFAULT : (long)size;
	}
}

/* Reads one page at @at to got, by one of the methods; false if that failed. */
static bool fetch_page(const struct page *page, void *at)
{
	static const enum op ways[] = { OP_process_vm_readv, OP_write_from, OP_mem_read };
	const unsigned long way = kz_rng() % 8;
	const enum op op = way < 3 ? ways[way] : OP_load;
	const long ret = transfer(op, got, at, PAGE);

	count(op, ret);
	if (ret == (long)PAGE)
		return true;
	/* Memory ran out, or the mapping is for writing only: programs can read that on x86. */
	return (op == OP_write_from || (op != OP_load && !(page->prot & PROT_READ))) &&
	       !copy_faults(got, at, PAGE);
}

static void compare(const unsigned char *mem, const struct page *page, unsigned long index)
{
	unsigned long i;

	__atomic_add_fetch(&shared->checked_pages, 1, __ATOMIC_RELAXED);
	if (page->unknown)
		return;
	model_fill(wanted, page);
	if (broken(BREAK_CONTENT))
		wanted[kz_rng() % PAGE] ^= 1;
	if (!memcmp(mem, wanted, PAGE))
		return;
	for (i = 0; mem[i] == wanted[i];)
		i++;
	violation("content", index, i, mem[i], wanted[i]);
}

/* x86 can read a mapping with any access; the kernel's own reads follow the flags. */
static void check_at(const struct page *page, unsigned long index, void *at)
{
	bool readable = page->kind != NONE && page->prot;

	if (page->kind == OTHER)
		return;
	if (broken(BREAK_ACCESS))
		readable = !readable;
	if (!readable) {
		current_op = OP_load;
		if (!copy_faults(got, (char *)at + kz_rng() % PAGE, 1))
			violation("readable", index, 0, 1, 0);
		return;
	}
	if (!fetch_page(page, at))
		violation("not readable", index, 0, 0, 1);
	compare(got, page, index);
}

static void check_some(struct range r, unsigned long most)
{
	unsigned long i, index;

	for EACH(i, r.number <= most ? r.number : most) {
		index = r.first + (r.number <= most ? i : kz_rng() % r.number);
		check_at(&pages[index], index, address(index));
	}
}

/* The kernel's list of mappings */

static void must_be_so(unsigned long index, enum kind kind, unsigned int prot)
{
	if (kind != pages[index].kind)
		violation("kind of mapping", index, 0, kind, pages[index].kind);
	if (prot != pages[index].prot)
		violation("protection", index, 0, prot, pages[index].prot);
}

static void check_mappings(void)
{
	scan((struct range){ 0, nr_pages }, must_be_so);
}

/* After a failure half-way, pages may be unmapped, and have the old or the new protection. */
static void may_be_done(unsigned long index, enum kind kind, unsigned int prot)
{
	if (kind == NONE)
		pages[index] = nothing;
	else if (kind != pages[index].kind)
		violation("kind of mapping after a failure", index, 0, kind, pages[index].kind);
	else
		pages[index].prot = (uint8_t)prot;
}

/* Ranges */

static struct range any_range(unsigned long most)
{
	struct range r;
	unsigned long max = kz_percent(80) ? 16 : kz_percent(90) ? 128 : MAX_RUN;

	r.first = kz_rng() % nr_pages;
	if (max > most)
		max = most;
	if (max > nr_pages - r.first)
		max = nr_pages - r.first;
	r.number = kz_between(1, max);
	return r;
}

/* Part of a run of pages that are alike, preferably of a reference page. */
static struct range run_of_pages(unsigned long most)
{
	struct range r = any_range(most);
	unsigned long i;

	for (i = 0; i < 8 && pages[r.first].kind != REF; i++)
		r = any_range(most);
	for (i = 1; i < r.number && alike(&pages[r.first], &pages[r.first + i]); i++)
		;
	r.number = i;
	return r;
}

static struct range some_range(unsigned long most)
{
	return kz_percent(60) ? run_of_pages(most) : any_range(most);
}

static unsigned long how_many(struct range r, enum kind kind)
{
	unsigned long i, found = 0;

	for EACH(i, r.number)
		found += pages[r.first + i].kind == kind;
	return found;
}

static bool has(struct range r, enum kind kind)
{
	return how_many(r, kind);
}

static bool all(struct range r, enum kind kind)
{
	return how_many(r, kind) == r.number;
}

static void mapped(struct range r, struct page like)
{
	unsigned long i;

	for EACH(i, r.number)
		pages[r.first + i] = like;
}

/* refpage_create() and its file */

static struct content any_content(void)
{
	struct content content = { .seed = (uint32_t)kz_rng() };

	content.style = (uint8_t)(kz_rng() % NR_STYLES);
	content.log2 = (uint8_t)(kz_rng() % 13);
	return content;
}

static void close_file(int slot)
{
	count(OP_fd_close, SYS(close, files[slot].fd));
	files[slot].fd = -1;
}

static int free_slot(void)
{
	int slot;

	for EACH(slot, NR_FILES)
		if (files[slot].fd < 0)
			return slot;
	slot = (int)(kz_rng() % NR_FILES);
	close_file(slot);
	return slot;
}

static void expect_create(const void *from, size_t size, unsigned int flags, long expected)
{
	long ret = SYS(refpage_create, from, size, flags);

	count(OP_refpage_create, ret);
	must_be("refpage_create", ret == -expected, ret, expected);
}

/* The call with valid arguments; its content comes from one of several places. */
static void create_good(void)
{
	struct content content = any_content();
	size_t size = 1UL << content.log2;
	char *from = (char *)SOURCE + 2 * PAGE - size;
	bool read_only = kz_percent(20);
	struct range r = run_of_pages(1);
	const struct page *page = &pages[r.first];
	long ret;
	int slot;

	if (kz_percent(15) && page->kind == REF && page->prot && !page->unknown && !page->nr_writes) {
		/* From another reference page. */
		content.seed = page->content.seed;
		content.style = page->content.style;
		if (content.log2 > page->content.log2)
			content.log2 = page->content.log2;
		from = address(r.first);
	} else {
		content_fill(got, content);
		/* To the very end of the mapping, or anywhere. */
		if (kz_percent(50))
			from -= kz_rng() % (2 * PAGE - size + 1);
		memcpy(from, got, size);
	}
	if (read_only)
		SYS(mprotect, SOURCE, 2 * PAGE, PROT_READ);
	slot = free_slot();
	ret = SYS(refpage_create, from, size, 0);
	count(OP_refpage_create, ret);
	if (read_only)
		SYS(mprotect, SOURCE, 2 * PAGE, PROT_READ | PROT_WRITE);
	must_be("refpage_create", !(broken(BREAK_ERRNO) && ret >= 0), ret, EINVAL);
	if (ret == -ENOMEM)
		return;
	must_be("refpage_create", ret >= 0, ret, 0);
	if (SYS(fcntl, ret, F_GETFD) != FD_CLOEXEC)
		violation("close-on-exec", ~0UL, 0, 0, 1);
	files[slot].fd = (int)ret;
	files[slot].content = content;
}

static void create_without_descriptors(void)
{
	struct rlimit old, none;

	if (SYS(prlimit64, 0, RLIMIT_NOFILE, 0, &old))
		return;
	none = (struct rlimit){ 0, old.rlim_max };
	if (SYS(prlimit64, 0, RLIMIT_NOFILE, &none, 0))
		return;
	expect_create((void *)SOURCE, 1UL << kz_rng() % 13, 0, EMFILE);
	SYS(prlimit64, 0, RLIMIT_NOFILE, &old, 0);
}

static void op_create(void)
{
	const char *end = (char *)SOURCE + 2 * PAGE;
	unsigned long size = 1UL << kz_rng() % 13;
	const void *anywhere[] = { (void *)SOURCE, NULL, end, (void *)~0UL, (void *)-4096L };
	const void *from = anywhere[kz_rng() % 5];

	switch (kz_rng() % 10) {
	case 0:
		/* Sizes that are no power of two, or too large, are rejected before bad pointers. */
		size = kz_percent(70) ? kz_between(0, 2 * PAGE) : kz_rng() >> kz_rng() % 64;
		if (!(size & (size - 1)) && size && size <= PAGE)
			size = kz_percent(50) ? 2 * PAGE : 0;
		expect_create(from, size, 0, EINVAL);
		break;
	case 1:
		expect_create(from, kz_percent(50) ? size : kz_rng() % (2 * PAGE + 1),
			      kz_percent(50) ? 1U << kz_rng() % 32 : (uint32_t)kz_rng() | 1, EINVAL);
		break;
	case 2:
		/* One byte beyond the mapping, or all of them. */
		from = size > 1 && kz_percent(70) ? end - kz_between(1, size - 1) : anywhere[kz_between(1, 4)];
		expect_create(from, size, 0, EFAULT);
		break;
	CASE(3, create_without_descriptors())
	default:
		create_good();
	}
}

static int any_file(void)
{
	int tries = 0, slot;

	do
		slot = (int)(kz_rng() % NR_FILES);
	while (files[slot].fd < 0 && ++tries < 16);
	return files[slot].fd < 0 ? -1 : slot;
}

static void must_fail(enum op op, long ret)
{
	must_be("it must fail", count(op, ret), ret, EINVAL);
}

static void op_fcntl(int fd)
{
	long ret;

	switch (kz_rng() % 4) {
	CASE(0, count(OP_fd_fcntl, SYS(fcntl, fd, F_SETFD, kz_rng() % 2)))
	CASE(1, count(OP_fd_fcntl, SYS(fcntl, fd, F_SETFL, kz_rng() % 2 * O_NONBLOCK)))
	case 2:
		ret = SYS(fcntl, fd, F_GETFL);
		count(OP_fd_fcntl, ret);
		if ((ret & O_ACCMODE) != O_RDONLY)
			violation("access mode", ~0UL, 0, (unsigned long)ret, O_RDONLY);
		break;
	default:
		must_fail(OP_fd_fcntl, SYS(fcntl, fd, F_ADD_SEALS, 1));
	}
}

static void op_fd(void)
{
	/* FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IOC_FIEMAP */
	static const unsigned int requests[] = {
		0x541b, 0x5421, 0x5450, 0x5451, 0x80086601, 0x40086602, 0xc020660b,
	};
	static unsigned char buffer[PAGE];
	int slot = any_file(), fd;
	unsigned long size = kz_percent(20) ? 0 : kz_between(1, PAGE);
	struct content content;
	long ret;

	if (slot < 0)
		return;
	fd = files[slot].fd;
	switch (kz_rng() % 13) {
	CASE(0, must_fail(OP_fd_read, SYS(read, fd, buffer, size)))
	CASE(1, must_fail(OP_fd_write, SYS(write, fd, buffer, size)))
	CASE(2, must_fail(OP_fd_pread, SYS(pread64, fd, buffer, size, kz_rng() % (2 * PAGE))))
	CASE(3, must_fail(OP_fd_pwrite, SYS(pwrite64, fd, buffer, size, kz_rng() % (2 * PAGE))))
	CASE(4, must_fail(OP_fd_fallocate, SYS(fallocate, fd, kz_rng() % 64, 0, PAGE)))
	CASE(5, must_fail(OP_fd_ftruncate, SYS(ftruncate, fd, kz_rng() % 2 * PAGE)))
	CASE(6, count(OP_fd_lseek, SYS(lseek, fd, kz_rng() % PAGE, kz_rng() % 6)))
	case 7:
		memset(buffer, 0, sizeof(buffer));
		count(OP_fd_ioctl, SYS(ioctl, fd, kz_percent(80) ? requests[kz_rng() % 7] : (uint32_t)kz_rng(), buffer));
		break;
	CASE(8, op_fcntl(fd))
	CASE(9, must_fail(OP_fd_sendfile, kz_percent(50) ? SYS(sendfile, scratch, fd, 0, PAGE) :
			  SYS(sendfile, fd, scratch, 0, PAGE)))
	CASE(10, close_file(slot))
	default:
		ret = kz_percent(50) ? SYS(dup, fd) : SYS(fcntl, fd, F_DUPFD_CLOEXEC, 0);
		if (count(OP_fd_dup, ret))
			break;
		content = files[slot].content;
		slot = free_slot();
		files[slot].fd = (int)ret;
		files[slot].content = content;
		break;
	}
}

/* Mappings */

static unsigned int any_prot(bool exec)
{
	const unsigned long dice = kz_rng() % 100;

	return dice < 60 ? PROT_READ | PROT_WRITE : dice < 80 ? PROT_READ : dice < 87 ? PROT_NONE :
	       dice < 93 || !exec ? PROT_WRITE :
	       PROT_READ | PROT_EXEC | (dice < 96 ? PROT_WRITE : 0);
}

static void op_mmap(void)
{
	struct range r = any_range(MAX_RUN);
	unsigned int prot = any_prot(true), flags = MAP_PRIVATE | MAP_FIXED;
	unsigned long offset = 0, length = r.number * PAGE;
	int slot = any_file();
	long ret, expected = 0;

	if (slot < 0) {
		create_good();
		return;
	}
	if (kz_percent(12))
		flags = MAP_FIXED | (kz_percent(50) ? MAP_SHARED : MAP_SHARED_VALIDATE);
	else if (kz_percent(15))
		flags |= MAP_FIXED_NOREPLACE;
	flags |= kz_percent(10) ? MAP_POPULATE : 0;
	flags |= kz_percent(10) ? MAP_NORESERVE : 0;
	flags |= r.number <= 64 && kz_percent(3) ? MAP_LOCKED : 0;
	if (kz_percent(50))
		offset = kz_rng() >> kz_between(14, 63) << 12;

	if (kz_percent(2)) {
		expected = EINVAL;
		length = kz_percent(50) ? 0 : length;
		offset |= length ? kz_between(1, PAGE - 1) : 0;
	} else if ((flags & MAP_FIXED_NOREPLACE) && !all(r, NONE)) {
		expected = EEXIST;
	} else if ((flags & MAP_SHARED) && (prot & PROT_WRITE)) {
		/* The file is not writable. */
		expected = EACCES;
	} else if (prot & PROT_EXEC) {
		/* The caller chooses the content. */
		expected = EPERM;
	} else if (flags & MAP_SHARED) {
		expected = EINVAL;
	}
	locked |= !!(flags & MAP_LOCKED);
	ret = SYS(mmap, address(r.first), length, prot, flags, files[slot].fd, offset);
	if (count(OP_mmap_refpage, ret)) {
		/* Memory may run out, for page tables among others. */
		must_be("mmap", ret == -expected || ret == -ENOMEM, ret, expected);
		scan(r, may_be_done);
	} else {
		must_be("mmap", !expected && ret == (long)address(r.first), 0, expected);
		mapped(r, (struct page){ .kind = REF, .prot = (uint8_t)prot, .content = files[slot].content });
	}
	check_some(r, 4);
}

static void op_mmap_other(void)
{
	struct range r = any_range(MAX_RUN);
	unsigned int prot = any_prot(false), flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS;
	bool shared_memory = kz_percent(20), file = !shared_memory && kz_percent(20);
	enum kind kind = shared_memory || file ? OTHER : ANON;
	int fd = file ? scratch : -1;

	if (shared_memory)
		flags = MAP_FIXED | MAP_SHARED | MAP_ANONYMOUS;
	else if (file)
		flags = MAP_FIXED | (kz_percent(50) ? MAP_PRIVATE : MAP_SHARED);
	if (count(OP_mmap_other, SYS(mmap, address(r.first), r.number * PAGE, prot, flags, fd, 0)))
		scan(r, may_be_done);
	else
		mapped(r, (struct page){ .kind = (uint8_t)kind, .prot = (uint8_t)prot });
	check_some(r, 2);
}

static void op_munmap(void)
{
	struct range r = some_range(MAX_RUN);
	long ret = SYS(munmap, address(r.first), r.number * PAGE);

	must_be("munmap", !count(OP_munmap, ret), ret, 0);
	mapped(r, nothing);
	check_some(r, 2);
}

static void op_mprotect(void)
{
	struct range r = some_range(MAX_RUN);
	unsigned int prot = any_prot(true);
	bool hole = has(r, NONE), refused = (prot & PROT_EXEC) && has(r, REF);
	long ret = SYS(mprotect, address(r.first), r.number * PAGE, prot);
	unsigned long i;

	if (!count(OP_mprotect, ret)) {
		must_be("mprotect", !hole && !refused, ret, hole ? ENOMEM : EACCES);
		for EACH(i, r.number)
			pages[r.first + i].prot = (uint8_t)prot;
	} else {
		must_be("mprotect",
			(hole && ret == -ENOMEM) || (refused && ret == -EACCES) || has(r, OTHER),
			ret, hole ? ENOMEM : 0);
		scan(r, may_be_done);
	}
	check_some(r, 4);
}

/* mremap() */

static struct page moving[MAX_RUN];

static void bad_mremap(void)
{
	struct range r = run_of_pages(64);
	char *at = address(r.first);
	unsigned long size = r.number * PAGE;
	long ret;

	switch (kz_rng() % 6) {
	CASE(0, ret = SYS(mremap, at + kz_between(1, PAGE - 1), size, size, 0, 0))
	CASE(1, ret = SYS(mremap, at, size, 0, MREMAP_MAYMOVE, 0))
	case 2:
		/* Onto itself. */
		ret = SYS(mremap, at, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at + size - PAGE);
		break;
	CASE(3, ret = SYS(mremap, at, size, size + PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0))
	CASE(4, ret = SYS(mremap, at, size, size, kz_percent(50) ? MREMAP_DONTUNMAP : MREMAP_FIXED, at + size))
	default:
		ret = SYS(mremap, at, size, size, 8U << kz_rng() % 28, 0);
		break;
	}
	count(OP_mremap_bad, ret);
	must_be("mremap", ret == -EINVAL, ret, EINVAL);
	check_some(r, 2);
}

static struct range moved_from, moved_to;

/* After a failed move each page has moved or stayed. */
static void may_have_moved(unsigned long index, enum kind kind, unsigned int prot KZ_MAYBE_UNUSED)
{
	unsigned long i = index - moved_to.first;

	if (kind == NONE)
		pages[index] = nothing;
	else if (i < moved_from.number && pages[moved_from.first + i].kind == NONE)
		pages[index] = moving[i];
}

static void failed_move(struct range from, struct range to, bool keeps)
{
	unsigned long i;

	scan(from, may_be_done);
	moved_from = from;
	moved_to = to;
	scan(to, may_have_moved);
	/* Nothing shows which pages moved if the source is kept. */
	for EACH(i, keeps ? from.number : 0)
		pages[from.first + i].unknown = true;
	scan(to, may_be_done);
}

/* Models a move from @r to @number pages, which are in moving[]. */
static void take_away(struct range r, unsigned long number, bool keeps)
{
	unsigned long i;

	for EACH(i, r.number) {
		moving[i] = pages[r.first + i];
		if (keeps)
			pristine(&pages[r.first + i]);
		else
			pages[r.first + i] = nothing;
	}
	for (; i < number; i++) {
		moving[i] = moving[r.number - 1];
		pristine(&moving[i]);
	}
}

/* Checks @number moved pages outside of the area and moves them into it; false if that failed. */
static bool bring_back(unsigned long at, unsigned long number, struct range *to)
{
	unsigned long i;

	for EACH(i, 4) {
		unsigned long which = kz_rng() % number;

		check_at(&moving[which], ~0UL, (char *)at + which * PAGE);
	}
	to->number = number;
	to->first = kz_rng() % (nr_pages - number + 1);
	if (!count(OP_mremap, SYS(mremap, at, number * PAGE, number * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
				  address(to->first))))
		return true;
	/* Pages that moved before the failure are given up, too. */
	SYS(munmap, at, number * PAGE);
	SYS(munmap, address(to->first), number * PAGE);
	mapped(*to, nothing);
	return false;
}

static void op_mremap(void)
{
	struct range r = run_of_pages(MAX_RUN / 2), to = { 0, 0 };
	unsigned long number = r.number, flags = 0, i;
	bool keeps = kz_percent(25), fixed = kz_percent(60), is_free;
	long ret;

	if (kz_percent(10)) {
		bad_mremap();
		return;
	}
	if (pages[r.first].kind != REF && pages[r.first].kind != ANON)
		return;
	if (!keeps && kz_percent(60))
		number = kz_percent(50) ? kz_between(1, r.number) : kz_between(r.number, MAX_RUN);
	if (number > nr_pages)
		number = nr_pages;
	flags |= keeps || fixed || kz_percent(50) ? MREMAP_MAYMOVE : 0;
	flags |= (keeps ? MREMAP_DONTUNMAP : 0) | (fixed ? MREMAP_FIXED : 0);
	/* The address is a hint when the source is kept, and is ignored otherwise. */
	if (fixed || keeps) {
		to.number = number;
		to.first = kz_rng() % (nr_pages - number + 1);
		if (to.first < r.first + r.number && r.first < to.first + number)
			return;
	}
	is_free = all(to, NONE);
	memcpy(moving, &pages[r.first], r.number * sizeof(*moving));
	ret = SYS(mremap, address(r.first), r.number * PAGE, number * PAGE, flags, address(to.first));
	if (count(keeps ? OP_mremap_dontunmap : OP_mremap, ret)) {
		failed_move(r, to, keeps);
		check_some(r, 4);
		return;
	}
	take_away(r, number, keeps);
	if ((uint64_t)ret < ARENA || (uint64_t)ret >= ARENA + nr_pages * PAGE) {
		must_be("mremap", !fixed, 0, EINVAL);
		if (!bring_back((unsigned long)ret, number, &to))
			return;
	} else if (!fixed) {
		if (!keeps)
			to = (struct range){ r.first, number };
		if (ret != (long)address(to.first) || (keeps && !is_free))
			violation("mremap went elsewhere", r.first, 0, (unsigned long)ret, 0);
	}
	for EACH(i, number)
		pages[to.first + i] = moving[i];
	check_some(to, 6);
	if (keeps)
		check_some(r, 4);
}

/* madvise() */

#define ADVICE_ROW(advice, name, weight) { MADV_##advice, weight },

static const struct {
	int advice;
	unsigned int weight;
} advices[] = { ADVICES(ADVICE_ROW) };

/* The documented errors of an advice. */
static void judge_advice(int advice, struct range r, int error)
{
	const bool hole = has(r, NONE), all_ref = all(r, REF);
	const unsigned int prot = pages[r.first].prot;
	bool alone = all_ref, wrong = !error && hole;
	int expected = hole ? ENOMEM : 0;
	unsigned long i;

	for (i = 1; alone && i < r.number; i++)
		alone = alike(&pages[r.first], &pages[r.first + i]);
	switch (advice) {
	case MADV_DONTNEED:
	case MADV_DONTNEED_LOCKED:
		wrong |= error && !(hole && error == ENOMEM) &&
			 !(advice == MADV_DONTNEED && locked && error == EINVAL);
		break;
	case MADV_FREE:
		wrong |= all_ref && error && !(locked && error == EINVAL);
		break;
	case MADV_WIPEONFORK:
		wrong |= all_ref && error && error != ENOMEM;
		break;
	case MADV_REMOVE:
		wrong |= !error && has(r, REF);
		expected = hole ? expected : EACCES;
		break;
	case MADV_POPULATE_READ:
	case MADV_POPULATE_WRITE:
		wrong |= alone && (prot & (advice == MADV_POPULATE_READ ? PROT_READ : PROT_WRITE)) && error &&
			 error != ENOMEM && error != EAGAIN && error != EINTR;
		break;
	}
	must_be("madvise", !wrong, -error, expected);
}

static void advised(int advice, struct page *page, int error, bool hole)
{
	/* A hole is reported at the end, when the rest is done. */
	const bool done = !error || (error == ENOMEM && hole), anon = page->kind == ANON || page->kind == REF;

	if (page->kind == NONE)
		return;
	if (advice == MADV_DONTNEED || advice == MADV_DONTNEED_LOCKED) {
		if (done)
			pristine(page);
		else if (page->nr_writes)
			page->unknown = true;
	} else if (advice == MADV_FREE) {
		page->unknown |= anon && page->nr_writes;
	} else if (advice == MADV_DONTFORK || (advice == MADV_DOFORK && page->dontfork)) {
		page->dontfork = !done ? MAYBE : advice == MADV_DONTFORK ? YES : NO;
	} else if ((advice == MADV_WIPEONFORK && anon && page->wipe != YES) ||
		   (advice == MADV_KEEPONFORK && page->wipe)) {
		page->wipe = !done ? MAYBE : advice == MADV_WIPEONFORK ? YES : NO;
	}
}

static void op_madvise(void)
{
	struct range r = some_range(MAX_RUN);
	unsigned int which = 0, dice, total = 0;
	unsigned long i;
	bool hole = has(r, NONE);
	int error;

	for EACH(i, sizeof(advices) / sizeof(advices[0]))
		total += advices[i].weight;
	for (dice = (unsigned int)(kz_rng() % total); dice >= advices[which].weight; which++)
		dice -= advices[which].weight;
	/* At times no page is read between it and a call before. */
	if (kz_percent(30))
		check_some(r, 4);
	error = count(OP_madvise_dontneed + which,
		      SYS(madvise, address(r.first), r.number * PAGE, advices[which].advice));
	judge_advice(advices[which].advice, r, error);
	for EACH(i, r.number)
		advised(advices[which].advice, &pages[r.first + i], error, hole);
	if (kz_percent(50))
		check_some(r, 4);
}

static void op_lock(void)
{
	struct range r = some_range(64);
	char *at = address(r.first);
	const unsigned long dice = kz_rng() % 8;

	/* mlockall() of more pages does not fit into a small guest. */
	if (dice < 2 || (dice == 2 && nr_pages <= 4096))
		locked = true;
	if (dice == 0)
		count(OP_mlock, SYS(mlock, at, r.number * PAGE));
	else if (dice == 1)
		count(OP_mlock2, SYS(mlock2, at, r.number * PAGE, MLOCK_ONFAULT));
	else if (dice == 2 && nr_pages <= 4096)
		count(OP_mlockall, SYS(mlockall, kz_between(1, 7)));
	else if (dice == 3)
		count(OP_munlock, SYS(munlock, at, r.number * PAGE));
	else if (dice > 3 && !count(OP_munlockall, SYS(munlockall)))
		locked = false;
	check_some(r, 2);
}

/* Reading and writing */

static void write_page(unsigned long index)
{
	static unsigned char buffer[PAGE] __attribute__((aligned(16)));
	static const enum op ways[] = { OP_process_vm_writev, OP_read_into, OP_mem_write };
	struct page *page = &pages[index];
	const bool writable = page->kind != NONE && (page->prot & PROT_WRITE);
	struct write write = { .seed = (uint32_t)kz_rng() };
	unsigned long way;
	enum op op;
	long ret;

	if (page->kind == OTHER)
		return;
	if (page->nr_writes == NR_WRITES || kz_percent(15)) {
		write.length = PAGE;
	} else {
		write.offset = (uint16_t)(kz_rng() % PAGE);
		write.length = kz_percent(50) ? 1 : (uint16_t)kz_between(1, PAGE - write.offset);
	}
	write_fill(buffer, write);
	way = kz_rng() % 8;
	op = way < 3 ? ways[way] : OP_store;
	ret = transfer(op, buffer + write.offset, (char *)address(index) + write.offset, write.length);
	/* The scratch file could not be written: memory ran out. */
	if (op == OP_read_into && ret == -ENOSPC)
		return;
	count(op, ret);
	if (ret == write.length) {
		/* /proc/self/mem writes read-only memory, as debuggers do. */
		if (!writable && (op != OP_mem_write || page->kind == NONE))
			violation("writable", index, write.offset, 1, 0);
		model_write(page, write);
	} else if (ret > 0) {
		violation("part of a page was written", index, write.offset, (unsigned long)ret, write.length);
	} else if (writable && op != OP_mem_write) {
		violation("not writable", index, write.offset, (unsigned long)-ret, 0);
	}
}

static void op_write(void)
{
	struct range r = some_range(MAX_RUN);
	unsigned long i, most = r.number > 32 ? 32 : r.number;

	for EACH(i, most)
		write_page(r.number <= 32 ? r.first + i : r.first + kz_rng() % r.number);
	if (kz_percent(50))
		check_some(r, 4);
}

static void op_read(void)
{
	check_some(some_range(MAX_RUN), 32);
}

/* One call for many pages: it ends at the first that cannot be read. */
static void op_read_many(void)
{
	static unsigned char buffer[16 * PAGE] __attribute__((aligned(16)));
	struct range r = some_range(16);
	unsigned long i, good;
	long ret;

	for EACH(good, r.number)
		if (pages[r.first + good].kind == NONE || !(pages[r.first + good].prot & PROT_READ))
			break;
	if (has(r, OTHER))
		return;
	ret = transfer(OP_process_vm_readv, buffer, address(r.first), r.number * PAGE);
	count(OP_process_vm_readv, ret);
	if (ret != (good ? (long)(good * PAGE) : -EFAULT))
		violation("amount read", r.first, good, (unsigned long)ret, good * PAGE);
	for EACH(i, good)
		compare(buffer + i * PAGE, &pages[r.first + i], r.first + i);
}

static void one_operation(bool may_fork);

static void become_child(void)
{
	unsigned long i;

	depth++;
	locked = false;
	for EACH(i, nr_pages) {
		if (pages[i].wipe == YES)
			pristine(&pages[i]);
		else if (pages[i].wipe == MAYBE)
			pages[i].unknown = true;
		/* Unmap pages that may have stayed with the parent. */
		if (pages[i].dontfork == MAYBE)
			SYS(munmap, address(i), PAGE);
		if (pages[i].dontfork != NO)
			pages[i] = nothing;
	}
}

static void op_fork(void)
{
	const unsigned long number = kz_between(2, 24), meanwhile = kz_between(0, 6);
	const uint64_t of_child = kz_rng();
	const struct range everything = { 0, nr_pages };
	int status = 0;
	unsigned long i;
	long pid = SYS(fork);

	if (count(OP_fork, pid))
		return;
	if (!pid) {
		kz_rng_state = of_child;
		become_child();
		if (kz_percent(25))
			check_mappings();
		for EACH(i, number)
			one_operation(depth < MAX_DEPTH);
		check_some(everything, 48);
		leave(KZ_OK);
	}
	/* Both run at the same time, so that it matters which one copies a page. */
	for EACH(i, meanwhile)
		one_operation(false);
	status = kz_wait((pid_t)pid, NULL);
	current_op = OP_fork;
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
		/* Memory ran out. */
		__atomic_add_fetch(&shared->killed, 1, __ATOMIC_RELAXED);
	else if (WIFSIGNALED(status))
		violation("a child was killed", ~0UL, 0, (unsigned long)WTERMSIG(status), 0);
	else if (WEXITSTATUS(status))
		/* It has reported its violation. */
		leave(KZ_FAILED);
	check_some(everything, 16);
}

static void one_operation(bool may_fork)
{
	static const struct {
		unsigned int below;	/* of a hundred */
		void (*run)(void);
	} operations[] = {
		{ 8, op_create }, { 14, op_fd }, { 25, op_mmap }, { 30, op_mmap_other }, { 33, op_munmap },
		{ 42, op_mremap }, { 48, op_mprotect }, { 64, op_madvise }, { 69, op_lock },
		{ 73, op_read_many }, { 85, op_write }, { 97, op_read }, { 100, op_fork },
	};
	const unsigned int dice = (unsigned int)(kz_rng() % 100);
	int i = 0;

	while (dice >= operations[i].below)
		i++;
	if (operations[i].run == op_fork && !may_fork)
		i--;
	operations[i].run();
}

static void set_up(void)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER };
	static char buffer[65536];
	long ret = SYS(refpage_create, "a", 1, 0);
	int i;

	if (ret == -ENOSYS)
		kz_die(KZ_BROKEN, "refpage_create: this kernel does not have it; boot one with CONFIG_REFPAGE");
	if (ret < 0)
		kz_fail("refpage_create");
	SYS(close, ret);
	setvbuf(stdout, buffer, _IOFBF, sizeof(buffer));
	shared = kz_map(sizeof(*shared), MAP_SHARED | MAP_ANONYMOUS);
	pages = kz_map(nr_pages * sizeof(*pages), 0);
	if (mmap((void *)SOURCE, 2 * PAGE, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED)
		kz_fail("cannot map 2 pages at %#lx", SOURCE);
	for EACH(i, NR_FILES)
		files[i].fd = -1;
	scratch = memfd_create("scratch", MFD_CLOEXEC);
	if (scratch < 0 || ftruncate(scratch, (MAX_DEPTH + 1) * PAGE))
		kz_fail("cannot make a file in memory");
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
}

/* Most of the area is mapped from the start: calls over holes only show little. */
static void first_mappings(void)
{
	const unsigned int prot = PROT_READ | PROT_WRITE;
	struct range r = { 0, 0 };
	int i, slot;

	kz_rng_state = kz_mix(~(uint64_t)seed);
	for EACH(i, NR_FILES / 2)
		create_good();
	for (; r.first < nr_pages; r.first += r.number) {
		r.number = kz_between(1, nr_pages - r.first > 64 ? 64 : nr_pages - r.first);
		slot = kz_percent(90) ? (int)(kz_rng() % (NR_FILES / 2)) : -1;
		if (slot < 0 || files[slot].fd < 0)
			continue;
		if (count(OP_mmap_refpage, SYS(mmap, address(r.first), r.number * PAGE, prot,
					       MAP_PRIVATE | MAP_FIXED, files[slot].fd, 0)))
			kz_fail("cannot map %lu pages of a reference page", r.number);
		mapped(r, (struct page){ .kind = REF, .prot = prot, .content = files[slot].content });
	}
}

static const char usage[] =
"usage: refpage_fuzz [options]\n"
"Random system calls around refpage_create(2), checked against a model; one JSON line at the end.\n"
"  --seconds S         duration (default 10, and 0 with --steps)\n"
"  --steps N           at least this many steps\n"
"  --seed N            the random choices (default 1)\n"
"  --pages N           size of the area it works on, 16 to 1048576 pages (default 1024)\n"
"  --break-model WHAT  expect a wrong result from step 50 on, so that the run fails:\n"
"                      content, access or errno\n"
"  --help              this text\n"
"A violation is a JSON line with the seed and the step; --seed and --steps repeat it.\n"
"Exit: 0 all as expected, 1 a violation, 2 bad usage, 3 the machine cannot do it.\n";

int main(int argc, char **argv)
{
	static const char *const parts[] = { "", "content", "access", "errno", NULL };
	struct range everything = { 0, 0 };
	unsigned int wrong = INTACT;
	const struct kz_option options[] = {
		{ "seconds", .number = &seconds, .min = 1, .max = 1000000 },
		{ "steps", .number = &least_steps, .min = 1, .max = 1000000000000UL },
		{ "seed", .number = &seed, .max = ULONG_MAX / 2 },
		{ "pages", .number = &nr_pages, .min = 16, .max = 1UL << 20 },
		{ "break-model", .choice = &wrong, .choices = parts },
		{ 0 },
	};
	uint64_t end;

	kz_only_options(argc, argv, "refpage_fuzz", usage, options);
	break_model = (enum broken)wrong;
	everything.number = nr_pages;
	if (!seconds && !least_steps)
		seconds = 10;
	set_up();
	end = kz_now_ns() + seconds * 1000000000ULL;
	first_mappings();
	for (step = 0; step < least_steps || (seconds && kz_now_ns() < end); step++) {
		kz_rng_state = kz_mix(kz_mix(seed) + step);
		one_operation(true);
		if (step % 64 == 63)
			check_mappings();
		if (step % 512 == 511)
			check_some(everything, nr_pages);
	}
	check_mappings();
	check_some(everything, nr_pages);
	report();
	return KZ_OK;
}
