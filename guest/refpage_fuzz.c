// SPDX-License-Identifier: GPL-2.0
/*
 * refpage_fuzz: random system calls around refpage_create(2), and a model of what every page of
 * an area must hold. It is made without libc, so that nothing else maps, allocates or forks here.
 *
 * Each step draws its choices from the seed and its own number alone. Most calls are given ranges
 * over any mixture of mappings, so many fail; a failed call must leave each page as it was, or
 * as the call would have left it.
 */
#include <asm/sigcontext.h>
#include <asm/siginfo.h>
#include <asm/signal.h>
#include <asm/ucontext.h>
#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/ioctl.h>
#include <linux/memfd.h>
#include <linux/mman.h>
#include <linux/resource.h>
#include <linux/time.h>
#include <linux/uio.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "exit_codes.h"

#ifndef __x86_64__
#error "this program enters the kernel as x86_64 does"
#endif

#ifndef __NR_refpage_create
#define __NR_refpage_create 473
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MLOCK_ONFAULT
#define MLOCK_ONFAULT 1
#endif
#ifndef SA_RESTORER
#define SA_RESTORER 0x04000000
#endif

#define PAGE 4096UL
/* Far from all that the kernel places by itself, and a multiple of any huge page. */
#define ARENA 0x100000000000UL
/* Two pages that content is taken from; nothing is mapped after them. */
#define SOURCE (ARENA - 64 * PAGE)
#define NR_FILES 8
#define NR_WRITES 4
#define MAX_RUN 512UL
#define MAX_ERRNO 134
#define MAX_DEPTH 2
/* The model is wrong from this step on with --break-model. */
#define BREAK_STEP 50

/*
 * System calls, and what else libc would do.
 */
static long sys(long number, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f)
{
	register uint64_t r10 __asm__("r10") = d;
	register uint64_t r8 __asm__("r8") = e;
	register uint64_t r9 __asm__("r9") = f;
	long ret;

	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
}

#define SYS_6(n, a, b, c, d, e, f, ...) \
	sys(__NR_##n, (uint64_t)(a), (uint64_t)(b), (uint64_t)(c), (uint64_t)(d), (uint64_t)(e), \
	    (uint64_t)(f))
#define SYS(...) SYS_6(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)

void *memset(void *mem, int byte, size_t size);
void *memcpy(void *to, const void *from, size_t size);

void *memset(void *mem, int byte, size_t size)
{
	void *at = mem;

	__asm__ volatile("rep stosb" : "+D"(at), "+c"(size) : "a"(byte) : "memory");
	return mem;
}

void *memcpy(void *to, const void *from, size_t size)
{
	size_t words = size / 8;
	void *at = to;

	/* An emulator takes each repetition as one instruction. */
	__asm__ volatile("rep movsq" : "+D"(at), "+S"(from), "+c"(words) : : "memory");
	size %= 8;
	__asm__ volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(size) : : "memory");
	return to;
}

static bool same_text(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

static bool starts_with(const char *text, const char *start)
{
	while (*start)
		if (*text++ != *start++)
			return false;
	return true;
}

static struct {
	char text[16384];
	size_t used;
} out;

static void out_flush(int fd)
{
	SYS(write, fd, out.text, out.used);
	out.used = 0;
}

static void out_char(char c)
{
	if (out.used < sizeof(out.text))
		out.text[out.used++] = c;
}

static void out_number(uint64_t value, unsigned int base)
{
	char digits[24];
	int n = 0;

	do {
		digits[n++] = "0123456789abcdef"[value % base];
		value /= base;
	} while (value);
	while (n)
		out_char(digits[--n]);
}

/* %s text, %u an unsigned long, %d a long, %x an unsigned long in hexadecimal. */
static void out_va(const char *fmt, va_list ap)
{
	const char *text;
	long value;

	for (; *fmt; fmt++) {
		if (*fmt != '%') {
			out_char(*fmt);
			continue;
		}
		switch (*++fmt) {
		case 's':
			for (text = va_arg(ap, const char *); *text; text++)
				out_char(*text);
			break;
		case 'u':
			out_number(va_arg(ap, unsigned long), 10);
			break;
		case 'x':
			out_number(va_arg(ap, unsigned long), 16);
			break;
		case 'd':
			value = va_arg(ap, long);
			if (value < 0)
				out_char('-');
			out_number(value < 0 ? -(uint64_t)value : (uint64_t)value, 10);
			break;
		}
	}
}

static void put(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	out_va(fmt, ap);
	va_end(ap);
}

static void leave(int code) __attribute__((noreturn));

static void leave(int code)
{
	for (;;)
		SYS(exit_group, code);
}

static void die(int code, const char *fmt, ...) __attribute__((noreturn));

static void die(int code, const char *fmt, ...)
{
	va_list ap;

	out.used = 0;
	put("refpage_fuzz: ");
	va_start(ap, fmt);
	out_va(fmt, ap);
	va_end(ap);
	put("\n");
	out_flush(2);
	leave(code);
}

static uint64_t now_ns(void)
{
	struct timespec ts = { 0, 0 };

	SYS(clock_gettime, 1 /* CLOCK_MONOTONIC */, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

static uint64_t rng_state;

static uint64_t rng(void)
{
	return mix(rng_state++);
}

static unsigned long between(unsigned long low, unsigned long high)
{
	return low + rng() % (high - low + 1);
}

static bool percent(unsigned int share)
{
	return rng() % 100 < share;
}

/*
 * What is counted, by the parent and its children.
 */
enum op {
	REFPAGE_CREATE, MMAP_REFPAGE, MMAP_OTHER, MUNMAP, MREMAP, MREMAP_BAD, MREMAP_DONTUNMAP_, MPROTECT,
	ADV_DONTNEED, ADV_DONTNEED_LOCKED, ADV_FREE, ADV_MERGEABLE, ADV_UNMERGEABLE, ADV_HUGEPAGE,
	ADV_NOHUGEPAGE, ADV_COLLAPSE, ADV_COLD, ADV_PAGEOUT, ADV_POPULATE_READ, ADV_POPULATE_WRITE,
	ADV_DONTFORK, ADV_DOFORK, ADV_WIPEONFORK, ADV_KEEPONFORK, ADV_REMOVE,
	MLOCK, MLOCK2, MUNLOCK, MLOCKALL, MUNLOCKALL, FORK,
	LOAD, STORE, VM_READV, VM_WRITEV, WRITE_FROM, READ_INTO, MEM_READ, MEM_WRITE,
	FD_READ, FD_WRITE, FD_PREAD, FD_PWRITE, FD_FALLOCATE, FD_FTRUNCATE, FD_LSEEK, FD_IOCTL,
	FD_FCNTL, FD_SENDFILE, FD_CLOSE, FD_DUP, NR_OPS
};

static const char *const op_names[NR_OPS] = {
	"refpage_create", "mmap_refpage", "mmap_other", "munmap", "mremap", "mremap_bad",
	"mremap_dontunmap", "mprotect",
	"madvise_dontneed", "madvise_dontneed_locked", "madvise_free", "madvise_mergeable",
	"madvise_unmergeable", "madvise_hugepage", "madvise_nohugepage", "madvise_collapse",
	"madvise_cold", "madvise_pageout", "madvise_populate_read", "madvise_populate_write",
	"madvise_dontfork", "madvise_dofork", "madvise_wipeonfork", "madvise_keeponfork",
	"madvise_remove",
	"mlock", "mlock2", "munlock", "mlockall", "munlockall", "fork",
	"load", "store", "process_vm_readv", "process_vm_writev", "write_from", "read_into", "mem_read",
	"mem_write",
	"fd_read", "fd_write", "fd_pread", "fd_pwrite", "fd_fallocate", "fd_ftruncate", "fd_lseek",
	"fd_ioctl", "fd_fcntl", "fd_sendfile", "fd_close", "fd_dup",
};

static const char *const error_names[MAX_ERRNO] = {
	[0] = "ok", [EPERM] = "EPERM", [ENOENT] = "ENOENT", [EINTR] = "EINTR", [EIO] = "EIO",
	[EBADF] = "EBADF", [EAGAIN] = "EAGAIN", [ENOMEM] = "ENOMEM", [EACCES] = "EACCES",
	[EFAULT] = "EFAULT", [EBUSY] = "EBUSY", [EEXIST] = "EEXIST", [ENODEV] = "ENODEV",
	[EINVAL] = "EINVAL", [ENFILE] = "ENFILE", [EMFILE] = "EMFILE", [ENOTTY] = "ENOTTY",
	[ENOSPC] = "ENOSPC", [ESPIPE] = "ESPIPE", [ENOSYS] = "ENOSYS", [EOVERFLOW] = "EOVERFLOW",
	[EOPNOTSUPP] = "EOPNOTSUPP", [EHWPOISON] = "EHWPOISON",
};

static struct shared {
	uint64_t count[NR_OPS][MAX_ERRNO];
	uint64_t checked_pages;
	uint64_t killed;
	uint64_t violations;
} *shared;

static enum op current_op;

/* Counts a call; the result is its error, positive, or 0. */
static int count(enum op op, long ret)
{
	int error = ret < 0 ? (int)-ret : 0;

	current_op = op;
	__atomic_add_fetch(&shared->count[op][error < MAX_ERRNO ? error : MAX_ERRNO - 1], 1,
			   __ATOMIC_RELAXED);
	return error;
}

/*
 * The model.
 */
enum style { ZEROS, BYTES, WORDS, NOISE, NR_STYLES };

/* The first 1 << log2 bytes of what style and seed make, again and again. */
struct content {
	uint32_t seed;
	uint8_t style;
	uint8_t log2;
};

struct write {
	uint16_t offset, length;
	uint32_t seed;
};

/* OTHER: what it holds may change behind our back, and is not checked. */
enum kind { NONE, REF, ANON, OTHER };

enum { NO, YES, MAYBE };

struct page {
	uint8_t kind;
	uint8_t prot;
	uint8_t dontfork, wipe;	/* NO, YES, MAYBE */
	bool unknown;		/* it may hold anything, but for what is written from now on */
	uint8_t nr_writes;
	struct content content;	/* with nothing written */
	struct write writes[NR_WRITES];
};

static struct page *pages;
static unsigned long nr_pages = 1024;
static struct {
	int fd;			/* -1: none */
	struct content content;
} files[NR_FILES];

static unsigned long seed = 1, step;
static int depth;
static int scratch = -1;
/* Some mapping may be locked in memory. */
static bool locked;
static enum broken { INTACT, BREAK_CONTENT, BREAK_ACCESS, BREAK_ERRNO } break_model;

static bool broken(enum broken what)
{
	return break_model == what && step >= BREAK_STEP;
}

static void report(void);

/* @index is that of a page, or ~0UL. */
static void violation(const char *what, unsigned long index, unsigned long offset, unsigned long found,
		      unsigned long expected) __attribute__((noreturn));

static void violation(const char *what, unsigned long index, unsigned long offset, unsigned long found,
		      unsigned long expected)
{
	out.used = 0;
	put("{\"violation\": {\"what\": \"%s\", \"operation\": \"%s\", \"seed\": %u, \"step\": %u, "
	    "\"children_deep\": %u, \"pages\": %u, \"page\": %d, \"offset\": %u, \"found\": %u, "
	    "\"expected\": %u", what, op_names[current_op], seed, step, (unsigned long)depth,
	    nr_pages, (long)index, offset, found, expected);
	if (index < nr_pages)
		put(", \"kind\": %u, \"prot\": %u, \"writes\": %u", (unsigned long)pages[index].kind,
		    (unsigned long)pages[index].prot, (unsigned long)pages[index].nr_writes);
	put("}}\n");
	out_flush(1);
	__atomic_add_fetch(&shared->violations, 1, __ATOMIC_RELAXED);
	if (!depth)
		report();
	leave(KZ_FAILED);
}

static void *address(unsigned long index)
{
	return (void *)(ARENA + index * PAGE);
}

static void content_fill(unsigned char *mem, struct content content)
{
	const unsigned long size = 1UL << content.log2;
	uint64_t word = mix(content.seed);
	unsigned long i;

	for (i = 0; i < PAGE; i += 8) {
		if (content.style == NOISE && i < size)
			word = mix((uint64_t)content.seed << 20 | i);
		else if (content.style == BYTES)
			word = (word & 255) * 0x0101010101010101ULL;
		else if (content.style == ZEROS)
			word = 0;
		*(uint64_t *)(void *)(mem + i) = word;
	}
	for (i = size; i < PAGE; i *= 2)
		memcpy(mem + i, mem, i);
}

/* What a write puts into a page depends on the place in it too. */
static void write_fill(unsigned char *mem, struct write write)
{
	const unsigned long end = (unsigned long)write.offset + write.length;
	uint64_t word = 0;
	unsigned long i;

	for (i = write.offset; i < end; i++) {
		if (i == write.offset || i % 8 == 0)
			word = mix((uint64_t)write.seed << 20 | (i / 8));
		mem[i] = (unsigned char)(word >> (i % 8 * 8));
	}
}

static void model_fill(unsigned char *mem, const struct page *page)
{
	int i;

	content_fill(mem, page->content);
	for (i = 0; i < page->nr_writes; i++)
		write_fill(mem, page->writes[i]);
}

static void model_write(struct page *page, struct write write)
{
	if (write.length == PAGE) {
		page->nr_writes = 0;
		page->unknown = false;
	}
	page->writes[page->nr_writes++] = write;
}

static void pristine(struct page *page)
{
	page->nr_writes = 0;
	page->unknown = false;
}

/* x86 can read what is mapped with any access; the kernel's own reads go by the flags. */
static bool accessible(const struct page *page)
{
	return page->kind != NONE && page->prot;
}

/*
 * A copy that may fault: the handler goes on after it. Returns whether it did.
 */
extern char copy_words[], copy_bytes[], copy_end[];

static __attribute__((noinline, noclone)) bool copy_faults(void *to, const void *from, size_t size)
{
	size_t words = size / 8;

	size %= 8;
	__asm__ volatile(".globl copy_words, copy_bytes, copy_end\n"
			 "copy_words: rep movsq\n"
			 "	mov %[size], %%rcx\n"
			 "copy_bytes: rep movsb\n"
			 "copy_end:"
			 : "+D"(to), "+S"(from), "+c"(words) : [size] "r"(size) : "memory");
	return words != 0;
}

static void on_fault(int number, siginfo_t *info, void *context)
{
	struct ucontext *uc = context;

	if (uc->uc_mcontext.rip == (uint64_t)copy_words || uc->uc_mcontext.rip == (uint64_t)copy_bytes) {
		uc->uc_mcontext.rip = (uint64_t)copy_end;
		return;
	}
	violation("crash", ~0UL, (unsigned long)info->si_addr, (unsigned long)number, 0);
}

void sigreturn_here(void);
__asm__(".text\n.globl sigreturn_here\nsigreturn_here: mov $15, %eax\nsyscall\n");

static void catch_faults(void)
{
	struct sigaction action = { 0 };

	action.sa_handler = (__sighandler_t)(void *)on_fault;
	action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTORER;
	action.sa_restorer = sigreturn_here;
	SYS(rt_sigaction, SIGSEGV, &action, 0, 8);
	SYS(rt_sigaction, SIGBUS, &action, 0, 8);
}

/*
 * Reading pages and comparing them with the model.
 */
static unsigned char wanted[PAGE] __attribute__((aligned(16)));
static unsigned char got[PAGE] __attribute__((aligned(16)));

static long self_mem(enum op op, void *mine, void *at, size_t size)
{
	long fd = SYS(open, "/proc/self/mem", O_RDWR | O_CLOEXEC), ret;

	if (fd < 0)
		return fd;
	ret = op == MEM_READ ? SYS(pread64, fd, mine, size, at) : SYS(pwrite64, fd, mine, size, at);
	SYS(close, fd);
	return ret;
}

static long vm_call(enum op op, void *mine, void *at, size_t size)
{
	struct iovec local = { mine, size }, remote = { at, size };
	long pid = SYS(getpid);

	if (op == VM_READV)
		return SYS(process_vm_readv, pid, &local, 1, &remote, 1, 0);
	return SYS(process_vm_writev, pid, &local, 1, &remote, 1, 0);
}

/* Reads one page at @at to got, in one of the ways there are; false if that faulted. */
static bool fetch_page(const struct page *page, void *at)
{
	enum op op = LOAD;
	long ret;

	switch (rng() % 8) {
	case 0:
		op = VM_READV;
		ret = vm_call(op, got, at, PAGE);
		break;
	case 1:
		op = WRITE_FROM;
		ret = SYS(pwrite64, scratch, at, PAGE, (unsigned long)depth * PAGE);
		if (ret == (long)PAGE)
			SYS(pread64, scratch, got, PAGE, (unsigned long)depth * PAGE);
		break;
	case 2:
		op = MEM_READ;
		ret = self_mem(op, got, at, PAGE);
		break;
	default:
		ret = copy_faults(got, at, PAGE) ? -EFAULT : (long)PAGE;
		break;
	}
	count(op, ret);
	if (ret == (long)PAGE)
		return true;
	/* Short of memory, or a mapping that is written only: programs can read that. */
	if (op == WRITE_FROM || ((op == VM_READV || op == MEM_READ) && !(page->prot & PROT_READ)))
		return !copy_faults(got, at, PAGE);
	return false;
}

/* With wanted. */
static void compare(const unsigned char *mem, unsigned long index)
{
	unsigned long i;

	for (i = 0; i < PAGE; i += 8)
		if (*(const uint64_t *)(const void *)(mem + i) != *(uint64_t *)(void *)(wanted + i))
			break;
	for (; i < PAGE; i++)
		if (mem[i] != wanted[i])
			violation("content", index, i, mem[i], wanted[i]);
}

static void check_at(const struct page *page, unsigned long index, void *at)
{
	bool readable = accessible(page);

	if (page->kind == OTHER)
		return;
	if (broken(BREAK_ACCESS))
		readable = !readable;
	if (!readable) {
		current_op = LOAD;
		if (!copy_faults(got, (char *)at + rng() % PAGE, 1))
			violation("readable", index, 0, 1, 0);
		return;
	}
	if (!fetch_page(page, at))
		violation("not readable", index, 0, 0, 1);
	__atomic_add_fetch(&shared->checked_pages, 1, __ATOMIC_RELAXED);
	if (page->unknown)
		return;
	model_fill(wanted, page);
	if (broken(BREAK_CONTENT))
		wanted[rng() % PAGE] ^= 1;
	compare(got, index);
}

static void check_page(unsigned long index)
{
	check_at(&pages[index], index, address(index));
}

static void check_some(unsigned long first, unsigned long number, unsigned long most)
{
	unsigned long i;

	if (number <= most)
		for (i = 0; i < number; i++)
			check_page(first + i);
	else
		for (i = 0; i < most; i++)
			check_page(first + rng() % number);
}

/*
 * The kernel's list of mappings.
 */
struct procmap_query_ {
	uint64_t size, query_flags, query_addr;
	uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
	uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
	uint64_t vma_name_addr, build_id_addr;
};

#define PROCMAP_QUERY_ _IOWR('f', 17, struct procmap_query_)
#define COVERING_OR_NEXT 0x10

/* Calls @fn for each page of the range with what the kernel says of it: kind and prot. */
static void scan(unsigned long first, unsigned long number,
		 void (*fn)(unsigned long index, enum kind kind, unsigned int prot))
{
	long fd = SYS(open, "/proc/self/maps", O_RDONLY | O_CLOEXEC);
	unsigned long i = first, end = first + number;
	static char name[4096];

	if (fd < 0)
		die(KZ_BROKEN, "/proc/self/maps: errno %u; mount /proc", (unsigned long)-fd);
	while (i < end) {
		struct procmap_query_ query = {
			.size = sizeof(query), .query_flags = COVERING_OR_NEXT,
			.query_addr = (uint64_t)address(i), .vma_name_size = sizeof(name),
			.vma_name_addr = (uint64_t)name,
		};
		long ret = SYS(ioctl, fd, PROCMAP_QUERY_, &query);
		enum kind kind = OTHER;

		if (ret && ret != -ENOENT)
			die(KZ_BROKEN, "PROCMAP_QUERY: errno %u", (unsigned long)-ret);
		if (ret)
			query.vma_start = query.vma_end = ~0UL;
		for (; i < end && (uint64_t)address(i) < query.vma_start; i++)
			fn(i, NONE, 0);
		if (!query.inode && !query.vma_name_size)
			kind = ANON;
		else if (query.vma_name_size && starts_with(name, "anon_inode:[refpage]"))
			kind = REF;
		for (; i < end && (uint64_t)address(i) < query.vma_end; i++)
			fn(i, kind, query.vma_flags & 7);
	}
	SYS(close, fd);
}

static void must_be_so(unsigned long index, enum kind kind, unsigned int prot)
{
	if (kind != pages[index].kind)
		violation("kind of mapping", index, 0, kind, pages[index].kind);
	if (prot != pages[index].prot)
		violation("protection", index, 0, prot, pages[index].prot);
}

static void check_mappings(void)
{
	scan(0, nr_pages, must_be_so);
}

/* After a failure half-way: what is unmapped is so, and protections are the new or the old ones. */
static void may_be_done(unsigned long index, enum kind kind, unsigned int prot)
{
	if (kind == NONE) {
		pages[index] = (struct page){ .kind = NONE };
		return;
	}
	if (kind != pages[index].kind)
		violation("kind of mapping after a failure", index, 0, kind, pages[index].kind);
	pages[index].prot = (uint8_t)prot;
}

static void adopt(unsigned long first, unsigned long number)
{
	scan(first, number, may_be_done);
}

/*
 * Ranges of the area.
 */
struct range {
	unsigned long first, number;
};

static bool alike(const struct page *a, const struct page *b)
{
	return a->kind == b->kind && a->prot == b->prot && a->dontfork == b->dontfork &&
	       a->wipe == b->wipe && a->content.seed == b->content.seed &&
	       a->content.style == b->content.style && a->content.log2 == b->content.log2;
}

static struct range any_range(unsigned long most)
{
	struct range r;
	unsigned long max = percent(80) ? 16 : percent(90) ? 128 : MAX_RUN;

	r.first = rng() % nr_pages;
	if (max > most)
		max = most;
	if (max > nr_pages - r.first)
		max = nr_pages - r.first;
	r.number = between(1, max);
	return r;
}

/* Part of a run of pages that are alike. */
static struct range run_of_pages(unsigned long most)
{
	struct range r = any_range(most);
	unsigned long i;

	/* Rather one of a reference page. */
	for (i = 0; i < 8 && pages[r.first].kind != REF; i++)
		r = any_range(most);
	for (i = 1; i < r.number; i++)
		if (!alike(&pages[r.first], &pages[r.first + i]))
			break;
	r.number = i;
	return r;
}

static struct range some_range(unsigned long most)
{
	return percent(60) ? run_of_pages(most) : any_range(most);
}

static bool has(struct range r, enum kind kind)
{
	unsigned long i;

	for (i = 0; i < r.number; i++)
		if (pages[r.first + i].kind == kind)
			return true;
	return false;
}

static bool all(struct range r, enum kind kind)
{
	unsigned long i;

	for (i = 0; i < r.number; i++)
		if (pages[r.first + i].kind != kind)
			return false;
	return true;
}

/*
 * refpage_create() and its file.
 */
static struct content any_content(void)
{
	return (struct content){
		.seed = (uint32_t)rng(),
		.style = (uint8_t)(rng() % NR_STYLES),
		.log2 = (uint8_t)(rng() % 13),
	};
}

static void close_file(int slot)
{
	count(FD_CLOSE, SYS(close, files[slot].fd));
	files[slot].fd = -1;
}

static int free_slot(void)
{
	int slot;

	for (slot = 0; slot < NR_FILES; slot++)
		if (files[slot].fd < 0)
			return slot;
	slot = (int)(rng() % NR_FILES);
	close_file(slot);
	return slot;
}

static void wrong_errno(const char *what, long found, long expected)
{
	violation(what, ~0UL, 0, (unsigned long)(found < 0 ? -found : 0), (unsigned long)expected);
}

static void expect_create(const void *from, size_t size, unsigned int flags, long expected)
{
	long ret = SYS(refpage_create, from, size, flags);

	count(REFPAGE_CREATE, ret);
	if (ret != -expected)
		wrong_errno("refpage_create", ret, expected);
}

/* The call with good arguments; where the content comes from is left to chance. */
static void create_good(void)
{
	struct content content = any_content();
	size_t size = 1UL << content.log2;
	char *from = (char *)SOURCE + 2 * PAGE - size;
	bool read_only = percent(20);
	struct range r = run_of_pages(1);
	const struct page *page = &pages[r.first];
	long ret;
	int slot;

	if (percent(15) && page->kind == REF && page->prot && !page->unknown && !page->nr_writes) {
		/* From another reference page. */
		content.seed = page->content.seed;
		content.style = page->content.style;
		if (content.log2 > page->content.log2)
			content.log2 = page->content.log2;
		from = address(r.first);
	} else {
		content_fill(got, content);
		/* To the very end of the mapping, or anywhere. */
		if (percent(50))
			from -= rng() % (2 * PAGE - size + 1);
		memcpy(from, got, size);
	}
	if (read_only)
		SYS(mprotect, SOURCE, 2 * PAGE, PROT_READ);
	slot = free_slot();
	ret = SYS(refpage_create, from, size, 0);
	count(REFPAGE_CREATE, ret);
	if (read_only)
		SYS(mprotect, SOURCE, 2 * PAGE, PROT_READ | PROT_WRITE);
	if (broken(BREAK_ERRNO) && ret >= 0)
		wrong_errno("refpage_create", ret, EINVAL);
	if (ret == -ENOMEM)
		return;
	if (ret < 0)
		wrong_errno("refpage_create", ret, 0);
	if (SYS(fcntl, ret, F_GETFD) != FD_CLOEXEC)
		violation("close-on-exec", ~0UL, 0, 0, 1);
	files[slot].fd = (int)ret;
	files[slot].content = content;
}

static void create_without_descriptors(void)
{
	struct rlimit64 old, none;

	if (SYS(prlimit64, 0, RLIMIT_NOFILE, 0, &old))
		return;
	none = old;
	none.rlim_cur = 0;
	if (SYS(prlimit64, 0, RLIMIT_NOFILE, &none, 0))
		return;
	expect_create((void *)SOURCE, 1UL << rng() % 13, 0, EMFILE);
	SYS(prlimit64, 0, RLIMIT_NOFILE, &old, 0);
}

static void op_create(void)
{
	const char *end = (char *)SOURCE + 2 * PAGE;
	unsigned long size = 1UL << rng() % 13;
	const void *anywhere[] = { (void *)SOURCE, NULL, end, (void *)~0UL, (void *)-4096L };
	const void *from = anywhere[rng() % 5];

	switch (rng() % 10) {
	case 0:
		/* Sizes that are no power of two, or too large, come before bad pointers. */
		size = percent(70) ? between(0, 2 * PAGE) : rng() >> rng() % 64;
		if (!(size & (size - 1)) && size && size <= PAGE)
			size = percent(50) ? 2 * PAGE : 0;
		expect_create(from, size, 0, EINVAL);
		break;
	case 1:
		expect_create(from, percent(50) ? size : rng() % (2 * PAGE + 1),
			      percent(50) ? 1U << rng() % 32 : (uint32_t)rng() | 1, EINVAL);
		break;
	case 2:
		/* One byte beyond the mapping, or all of them. */
		from = size > 1 && percent(70) ? end - between(1, size - 1) : anywhere[between(1, 4)];
		expect_create(from, size, 0, EFAULT);
		break;
	case 3:
		create_without_descriptors();
		break;
	default:
		create_good();
		break;
	}
}

static int any_file(void)
{
	int slot, tries;

	for (tries = 0; tries < 16; tries++) {
		slot = (int)(rng() % NR_FILES);
		if (files[slot].fd >= 0)
			return slot;
	}
	return -1;
}

static void must_fail(enum op op, long ret)
{
	if (!count(op, ret))
		wrong_errno("it must fail", ret, EINVAL);
}

static void op_fd(void)
{
	static const unsigned int requests[] = {
		0x541b /* FIONREAD */, 0x5421 /* FIONBIO */, 0x5450 /* FIONCLEX */,
		0x5451 /* FIOCLEX */, 0x80086601 /* FS_IOC_GETFLAGS */, 0x40086602 /* FS_IOC_SETFLAGS */,
		0xc020660b /* FS_IOC_FIEMAP */,
	};
	static unsigned char buffer[PAGE];
	int slot = any_file(), fd;
	unsigned long size = percent(20) ? 0 : between(1, PAGE);
	long ret;

	if (slot < 0)
		return;
	fd = files[slot].fd;
	switch (rng() % 13) {
	case 0:
		must_fail(FD_READ, SYS(read, fd, buffer, size));
		break;
	case 1:
		must_fail(FD_WRITE, SYS(write, fd, buffer, size));
		break;
	case 2:
		must_fail(FD_PREAD, SYS(pread64, fd, buffer, size, rng() % (2 * PAGE)));
		break;
	case 3:
		must_fail(FD_PWRITE, SYS(pwrite64, fd, buffer, size, rng() % (2 * PAGE)));
		break;
	case 4:
		must_fail(FD_FALLOCATE, SYS(fallocate, fd, rng() % 64, 0, PAGE));
		break;
	case 5:
		must_fail(FD_FTRUNCATE, SYS(ftruncate, fd, rng() % 2 * PAGE));
		break;
	case 6:
		count(FD_LSEEK, SYS(lseek, fd, rng() % PAGE, rng() % 6));
		break;
	case 7:
		memset(buffer, 0, sizeof(buffer));
		count(FD_IOCTL, SYS(ioctl, fd, percent(80) ? requests[rng() % 7] : (uint32_t)rng(), buffer));
		break;
	case 8:
		switch (rng() % 4) {
		case 0:
			count(FD_FCNTL, SYS(fcntl, fd, F_SETFD, rng() % 2));
			break;
		case 1:
			count(FD_FCNTL, SYS(fcntl, fd, F_SETFL, rng() % 2 * O_NONBLOCK));
			break;
		case 2:
			ret = SYS(fcntl, fd, F_GETFL);
			count(FD_FCNTL, ret);
			if ((ret & O_ACCMODE) != O_RDONLY)
				violation("access mode", ~0UL, 0, (unsigned long)ret, O_RDONLY);
			break;
		default:
			must_fail(FD_FCNTL, SYS(fcntl, fd, F_ADD_SEALS, 1));
			break;
		}
		break;
	case 9:
		if (percent(50))
			must_fail(FD_SENDFILE, SYS(sendfile, scratch, fd, 0, PAGE));
		else
			must_fail(FD_SENDFILE, SYS(sendfile, fd, scratch, 0, PAGE));
		break;
	case 10:
		close_file(slot);
		break;
	default:
		ret = percent(50) ? SYS(dup, fd) : SYS(fcntl, fd, F_DUPFD_CLOEXEC, 0);
		count(FD_DUP, ret);
		if (ret >= 0) {
			struct content content = files[slot].content;

			slot = free_slot();
			files[slot].fd = (int)ret;
			files[slot].content = content;
		}
		break;
	}
}

/*
 * Mappings.
 */
static unsigned int any_prot(bool exec)
{
	unsigned int dice = (unsigned int)(rng() % 100);

	if (dice < 60)
		return PROT_READ | PROT_WRITE;
	if (dice < 80)
		return PROT_READ;
	if (dice < 87)
		return PROT_NONE;
	if (dice < 93 || !exec)
		return PROT_WRITE;
	return PROT_READ | PROT_EXEC | (dice < 96 ? PROT_WRITE : 0);
}

static void mapped(struct range r, struct page like)
{
	unsigned long i;

	for (i = 0; i < r.number; i++)
		pages[r.first + i] = like;
}

static void map_file(struct range r, int slot)
{
	const unsigned int prot = PROT_READ | PROT_WRITE;
	long ret;

	if (files[slot].fd < 0)
		return;
	ret = SYS(mmap, address(r.first), r.number * PAGE, prot, MAP_PRIVATE | MAP_FIXED, files[slot].fd, 0);
	if (count(MMAP_REFPAGE, ret > -4096 && ret < 0 ? ret : 0))
		die(KZ_BROKEN, "mmap: errno %u", (unsigned long)-ret);
	mapped(r, (struct page){ .kind = REF, .prot = prot, .content = files[slot].content });
}

static void op_mmap(void)
{
	struct range r = any_range(MAX_RUN);
	unsigned int prot = any_prot(true), flags = MAP_PRIVATE | MAP_FIXED;
	unsigned long offset = 0, length = r.number * PAGE, expected = 0;
	int slot = any_file();
	long ret;

	if (slot < 0) {
		create_good();
		return;
	}
	if (percent(12))
		flags = MAP_FIXED | (percent(50) ? MAP_SHARED : MAP_SHARED_VALIDATE);
	else if (percent(15))
		flags |= MAP_FIXED_NOREPLACE;
	if (percent(10))
		flags |= MAP_POPULATE;
	if (percent(10))
		flags |= MAP_NORESERVE;
	if (r.number <= 64 && percent(3))
		flags |= MAP_LOCKED;
	if (percent(50))
		offset = rng() >> between(14, 63) << 12;

	if (percent(2)) {
		expected = EINVAL;
		if (percent(50))
			length = 0;
		else
			offset |= between(1, PAGE - 1);
	} else if ((flags & MAP_FIXED_NOREPLACE) && !all(r, NONE)) {
		expected = EEXIST;
	} else if ((flags & MAP_SHARED) && (prot & PROT_WRITE)) {
		/* The file is one that cannot be written. */
		expected = EACCES;
	} else if (prot & PROT_EXEC) {
		expected = EPERM;
	} else if (flags & MAP_SHARED) {
		expected = EINVAL;
	}
	if (flags & MAP_LOCKED)
		locked = true;
	ret = SYS(mmap, address(r.first), length, prot, flags, files[slot].fd, offset);
	count(MMAP_REFPAGE, ret);
	if (ret < 0 && ret > -4096) {
		/* There may be no memory for page tables or the like. */
		if (ret != -(long)expected && ret != -ENOMEM)
			wrong_errno("mmap", ret, (long)expected);
		adopt(r.first, r.number);
	} else if (expected || ret != (long)address(r.first)) {
		wrong_errno("mmap", 0, (long)expected);
	} else {
		mapped(r, (struct page){ .kind = REF, .prot = (uint8_t)prot,
					 .content = files[slot].content });
	}
	check_some(r.first, r.number, 4);
}

static void op_mmap_other(void)
{
	struct range r = any_range(MAX_RUN);
	unsigned int prot = any_prot(false), flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS;
	enum kind kind = ANON;
	int fd = -1;
	long ret;

	if (percent(20)) {
		kind = OTHER;
		flags = MAP_FIXED | MAP_SHARED | MAP_ANONYMOUS;
	} else if (percent(20)) {
		kind = OTHER;
		flags = MAP_FIXED | (percent(50) ? MAP_PRIVATE : MAP_SHARED);
		fd = scratch;
	}
	ret = SYS(mmap, address(r.first), r.number * PAGE, prot, flags, fd, 0);
	if (count(MMAP_OTHER, ret > -4096 && ret < 0 ? ret : 0))
		adopt(r.first, r.number);
	else
		mapped(r, (struct page){ .kind = (uint8_t)kind, .prot = (uint8_t)prot });
	check_some(r.first, r.number, 2);
}

static void op_munmap(void)
{
	struct range r = some_range(MAX_RUN);
	long ret = SYS(munmap, address(r.first), r.number * PAGE);

	if (count(MUNMAP, ret))
		wrong_errno("munmap", ret, 0);
	mapped(r, (struct page){ .kind = NONE });
	check_some(r.first, r.number, 2);
}

static void op_mprotect(void)
{
	struct range r = some_range(MAX_RUN);
	unsigned int prot = any_prot(true);
	bool hole = has(r, NONE), refused = (prot & PROT_EXEC) && has(r, REF);
	long ret = SYS(mprotect, address(r.first), r.number * PAGE, prot);
	unsigned long i;

	if (!count(MPROTECT, ret)) {
		if (hole || refused)
			wrong_errno("mprotect", ret, hole ? ENOMEM : EACCES);
		for (i = 0; i < r.number; i++)
			pages[r.first + i].prot = (uint8_t)prot;
	} else {
		if (!(hole && ret == -ENOMEM) && !(refused && ret == -EACCES) && !has(r, OTHER))
			wrong_errno("mprotect", ret, hole ? ENOMEM : refused ? EACCES : 0);
		adopt(r.first, r.number);
	}
	check_some(r.first, r.number, 4);
}

/*
 * mremap().
 */
static struct page moving[MAX_RUN];

static void bad_mremap(void)
{
	struct range r = run_of_pages(64);
	char *at = address(r.first);
	unsigned long size = r.number * PAGE;
	long ret;

	switch (rng() % 6) {
	case 0:
		ret = SYS(mremap, at + between(1, PAGE - 1), size, size, 0, 0);
		break;
	case 1:
		ret = SYS(mremap, at, size, 0, MREMAP_MAYMOVE, 0);
		break;
	case 2:
		/* Onto itself. */
		ret = SYS(mremap, at, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at + size - PAGE);
		break;
	case 3:
		ret = SYS(mremap, at, size, size + PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
		break;
	case 4:
		ret = SYS(mremap, at, size, size, percent(50) ? MREMAP_DONTUNMAP : MREMAP_FIXED, at + size);
		break;
	default:
		ret = SYS(mremap, at, size, size, 8U << rng() % 28, 0);
		break;
	}
	count(MREMAP_BAD, ret);
	if (ret != -EINVAL)
		wrong_errno("mremap", ret, EINVAL);
	check_some(r.first, r.number, 2);
}

static unsigned long adopt_from, adopt_to, adopt_number;

/* After a failed move: page by page, it has moved or stayed. */
static void may_have_moved(unsigned long index, enum kind kind, unsigned int prot)
{
	unsigned long i = index - adopt_to;
	struct page *from = i < adopt_number ? &pages[adopt_from + i] : NULL;

	(void)prot;
	if (kind == NONE)
		pages[index] = (struct page){ .kind = NONE };
	else if (from && from->kind == NONE)
		pages[index] = moving[i];
}

static void failed_move(struct range from, struct range to, bool keeps)
{
	unsigned long i;

	adopt(from.first, from.number);
	adopt_from = from.first;
	adopt_to = to.first;
	adopt_number = from.number;
	scan(to.first, to.number, may_have_moved);
	/* With the source kept, nothing tells. */
	for (i = 0; keeps && i < from.number; i++)
		pages[from.first + i].unknown = true;
	adopt(to.first, to.number);
}

/* The model of a move from @r to @number pages, which are in moving[]. */
static void take_away(struct range r, unsigned long number, bool keeps)
{
	unsigned long i;

	for (i = 0; i < r.number; i++) {
		moving[i] = pages[r.first + i];
		if (keeps)
			pristine(&pages[r.first + i]);
		else
			pages[r.first + i] = (struct page){ .kind = NONE };
	}
	for (; i < number; i++) {
		moving[i] = moving[r.number - 1];
		pristine(&moving[i]);
	}
}

static void op_mremap(void)
{
	struct range r = run_of_pages(MAX_RUN / 2), to = { 0, 0 };
	unsigned long number = r.number, flags = 0, i;
	bool keeps = percent(25), fixed = percent(60), is_free, outside;
	enum op op = keeps ? MREMAP_DONTUNMAP_ : MREMAP;
	long ret;

	if (percent(10)) {
		bad_mremap();
		return;
	}
	if (pages[r.first].kind != REF && pages[r.first].kind != ANON)
		return;
	if (!keeps && percent(60))
		number = percent(50) ? between(1, r.number) : between(r.number, MAX_RUN);
	if (number > nr_pages)
		number = nr_pages;
	if (keeps || fixed || percent(50))
		flags |= MREMAP_MAYMOVE;
	if (keeps)
		flags |= MREMAP_DONTUNMAP;
	if (fixed)
		flags |= MREMAP_FIXED;
	/* The address is a hint when the source is kept, and says nothing when it is not. */
	if (fixed || keeps) {
		to.number = number;
		to.first = rng() % (nr_pages - number + 1);
		if (to.first < r.first + r.number && r.first < to.first + number)
			return;
	}
	is_free = all(to, NONE);
	for (i = 0; i < r.number; i++)
		moving[i] = pages[r.first + i];
	ret = SYS(mremap, address(r.first), r.number * PAGE, number * PAGE, flags, address(to.first));
	if (ret < 0 && ret > -4096) {
		count(op, ret);
		failed_move(r, to, keeps);
		check_some(r.first, r.number, 4);
		return;
	}
	count(op, 0);
	take_away(r, number, keeps);
	outside = (uint64_t)ret < ARENA || (uint64_t)ret >= ARENA + nr_pages * PAGE;
	if (outside) {
		if (fixed)
			wrong_errno("mremap", 0, EINVAL);
		for (i = 0; i < 4; i++) {
			unsigned long which = rng() % number;

			check_at(&moving[which], ~0UL, (char *)ret + which * PAGE);
		}
		to.number = number;
		to.first = rng() % (nr_pages - number + 1);
		i = (unsigned long)ret;
		ret = SYS(mremap, i, number * PAGE, number * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
			  address(to.first));
		if (count(MREMAP, ret < 0 && ret > -4096 ? ret : 0)) {
			/* What was moved before it failed is given up, too. */
			SYS(munmap, i, number * PAGE);
			SYS(munmap, address(to.first), number * PAGE);
			mapped(to, (struct page){ .kind = NONE });
			return;
		}
	} else if (!fixed) {
		if (!keeps)
			to = (struct range){ r.first, number };
		if (ret != (long)address(to.first) || (keeps && !is_free))
			violation("mremap went elsewhere", r.first, 0, (unsigned long)ret, 0);
	}
	for (i = 0; i < number; i++)
		pages[to.first + i] = moving[i];
	check_some(to.first, to.number, 6);
	if (keeps)
		check_some(r.first, r.number, 4);
}

/*
 * madvise().
 */
static const struct {
	int advice;
	enum op op;
	unsigned int weight;
} advices[] = {
	{ MADV_DONTNEED, ADV_DONTNEED, 24 },
	{ MADV_DONTNEED_LOCKED, ADV_DONTNEED_LOCKED, 4 },
	{ MADV_FREE, ADV_FREE, 5 },
	{ MADV_MERGEABLE, ADV_MERGEABLE, 6 },
	{ MADV_UNMERGEABLE, ADV_UNMERGEABLE, 3 },
	{ MADV_HUGEPAGE, ADV_HUGEPAGE, 4 },
	{ MADV_NOHUGEPAGE, ADV_NOHUGEPAGE, 2 },
	{ MADV_COLLAPSE, ADV_COLLAPSE, 2 },
	{ MADV_COLD, ADV_COLD, 5 },
	{ MADV_PAGEOUT, ADV_PAGEOUT, 12 },
	{ MADV_POPULATE_READ, ADV_POPULATE_READ, 6 },
	{ MADV_POPULATE_WRITE, ADV_POPULATE_WRITE, 6 },
	{ MADV_DONTFORK, ADV_DONTFORK, 3 },
	{ MADV_DOFORK, ADV_DOFORK, 3 },
	{ MADV_WIPEONFORK, ADV_WIPEONFORK, 4 },
	{ MADV_KEEPONFORK, ADV_KEEPONFORK, 2 },
	{ MADV_REMOVE, ADV_REMOVE, 5 },
};

/* What the documents say of an advice as a whole. */
static void judge_advice(int advice, struct range r, int error)
{
	const bool hole = has(r, NONE), all_ref = all(r, REF);
	const unsigned int prot = pages[r.first].prot;
	unsigned long i;
	bool alone = all_ref;

	for (i = 1; alone && i < r.number; i++)
		alone = alike(&pages[r.first], &pages[r.first + i]);
	if (!error && hole)
		wrong_errno("madvise over a hole", 0, ENOMEM);
	switch (advice) {
	case MADV_DONTNEED:
		if (error && !(hole && error == ENOMEM) && !(locked && error == EINVAL))
			wrong_errno("madvise", -error, hole ? ENOMEM : 0);
		break;
	case MADV_DONTNEED_LOCKED:
		if (error && !(hole && error == ENOMEM))
			wrong_errno("madvise", -error, hole ? ENOMEM : 0);
		break;
	case MADV_FREE:
	case MADV_WIPEONFORK:
		if ((!error && has(r, REF)) || (all_ref && error != EINVAL))
			wrong_errno("madvise", -error, EINVAL);
		break;
	case MADV_REMOVE:
		if (!error && has(r, REF))
			wrong_errno("madvise", -error, EACCES);
		break;
	case MADV_POPULATE_READ:
	case MADV_POPULATE_WRITE:
		if (alone && (prot & (advice == MADV_POPULATE_READ ? PROT_READ : PROT_WRITE)) && error &&
		    error != ENOMEM && error != EAGAIN && error != EINTR)
			wrong_errno("madvise", -error, 0);
		break;
	}
}

static void advised(int advice, struct page *page, int error, bool hole)
{
	/* A hole is told at the end, after all is done. */
	const bool done = !error || (error == ENOMEM && hole);

	if (page->kind == NONE)
		return;
	switch (advice) {
	case MADV_DONTNEED:
	case MADV_DONTNEED_LOCKED:
		if (done)
			pristine(page);
		else if (page->nr_writes)
			page->unknown = true;
		break;
	case MADV_FREE:
		if (page->kind == ANON && page->nr_writes)
			page->unknown = true;
		break;
	case MADV_DONTFORK:
		page->dontfork = done ? YES : MAYBE;
		break;
	case MADV_DOFORK:
		if (page->dontfork)
			page->dontfork = done ? NO : MAYBE;
		break;
	case MADV_WIPEONFORK:
		if (page->kind == ANON && page->wipe != YES)
			page->wipe = done ? YES : MAYBE;
		break;
	case MADV_KEEPONFORK:
		if (page->wipe)
			page->wipe = done ? NO : MAYBE;
		break;
	}
}

static void op_madvise(void)
{
	struct range r = some_range(MAX_RUN);
	unsigned int which = 0, dice, total = 0;
	unsigned long i;
	bool hole = has(r, NONE);
	int error;

	for (i = 0; i < sizeof(advices) / sizeof(advices[0]); i++)
		total += advices[i].weight;
	for (dice = (unsigned int)(rng() % total); dice >= advices[which].weight; which++)
		dice -= advices[which].weight;
	/* At times no page is read between it and a call before. */
	if (percent(30))
		check_some(r.first, r.number, 4);
	error = count(advices[which].op,
		      SYS(madvise, address(r.first), r.number * PAGE, advices[which].advice));
	judge_advice(advices[which].advice, r, error);
	for (i = 0; i < r.number; i++)
		advised(advices[which].advice, &pages[r.first + i], error, hole);
	if (percent(50))
		check_some(r.first, r.number, 4);
}

static void op_lock(void)
{
	struct range r = some_range(64);
	char *at = address(r.first);

	switch (rng() % 8) {
	case 0:
		locked = true;
		count(MLOCK, SYS(mlock, at, r.number * PAGE));
		break;
	case 1:
		locked = true;
		count(MLOCK2, SYS(mlock2, at, r.number * PAGE, MLOCK_ONFAULT));
		break;
	case 2:
		/* Not more than fits into a small guest. */
		if (nr_pages > 4096)
			break;
		locked = true;
		count(MLOCKALL, SYS(mlockall, between(1, 7)));
		break;
	case 3:
		count(MUNLOCK, SYS(munlock, at, r.number * PAGE));
		break;
	default:
		if (!count(MUNLOCKALL, SYS(munlockall)))
			locked = false;
		break;
	}
	check_some(r.first, r.number, 2);
}

/*
 * Reading and writing.
 */
static void write_page(unsigned long index)
{
	static unsigned char buffer[PAGE] __attribute__((aligned(16)));
	struct page *page = &pages[index];
	const bool writable = page->kind != NONE && (page->prot & PROT_WRITE);
	struct write write = { .seed = (uint32_t)rng() };
	enum op op = STORE;
	void *from, *at;
	long ret;

	if (page->kind == OTHER)
		return;
	if (page->nr_writes == NR_WRITES || percent(15)) {
		write.length = PAGE;
	} else {
		write.offset = (uint16_t)(rng() % PAGE);
		write.length = percent(50) ? 1 : (uint16_t)between(1, PAGE - write.offset);
	}
	write_fill(buffer, write);
	from = buffer + write.offset;
	at = (char *)address(index) + write.offset;
	switch (rng() % 8) {
	case 0:
		op = VM_WRITEV;
		ret = vm_call(op, from, at, write.length);
		break;
	case 1:
		op = READ_INTO;
		if (SYS(pwrite64, scratch, from, write.length, (unsigned long)depth * PAGE) !=
		    write.length)
			return;
		ret = SYS(pread64, scratch, at, write.length, (unsigned long)depth * PAGE);
		break;
	case 2:
		op = MEM_WRITE;
		ret = self_mem(op, from, at, write.length);
		break;
	default:
		ret = copy_faults(at, from, write.length) ? -EFAULT : write.length;
		break;
	}
	count(op, ret);
	if (ret == write.length) {
		/* /proc/self/mem writes what is read-only, as debuggers do. */
		if (!writable && (op != MEM_WRITE || page->kind == NONE))
			violation("writable", index, write.offset, 1, 0);
		model_write(page, write);
	} else if (ret > 0) {
		violation("part of a page was written", index, write.offset, (unsigned long)ret,
			  write.length);
	} else if (writable && op != MEM_WRITE) {
		violation("not writable", index, write.offset, (unsigned long)-ret, 0);
	}
}

static void op_write(void)
{
	struct range r = some_range(MAX_RUN);
	unsigned long i, most = r.number > 32 ? 32 : r.number;

	for (i = 0; i < most; i++)
		write_page(r.number <= 32 ? r.first + i : r.first + rng() % r.number);
	if (percent(50))
		check_some(r.first, r.number, 4);
}

static void op_read(void)
{
	struct range r = some_range(MAX_RUN);

	check_some(r.first, r.number, 32);
}

/* One call for many pages: it ends at the first that cannot be read. */
static void op_read_many(void)
{
	static unsigned char buffer[16 * PAGE] __attribute__((aligned(16)));
	struct range r = some_range(16);
	unsigned long i, good;
	long ret;

	for (good = 0; good < r.number; good++)
		if (pages[r.first + good].kind == NONE || !(pages[r.first + good].prot & PROT_READ))
			break;
	if (has(r, OTHER))
		return;
	ret = vm_call(VM_READV, buffer, address(r.first), r.number * PAGE);
	count(VM_READV, ret);
	if (ret != (good ? (long)(good * PAGE) : -EFAULT))
		violation("amount read", r.first, good, (unsigned long)ret, good * PAGE);
	for (i = 0; i < good; i++) {
		if (pages[r.first + i].unknown)
			continue;
		model_fill(wanted, &pages[r.first + i]);
		compare(buffer + i * PAGE, r.first + i);
	}
	__atomic_add_fetch(&shared->checked_pages, good, __ATOMIC_RELAXED);
}

/*
 * fork().
 */
static void one_operation(bool may_fork);

static void become_child(void)
{
	unsigned long i;

	depth++;
	locked = false;
	for (i = 0; i < nr_pages; i++) {
		struct page *page = &pages[i];

		if (page->dontfork == YES)
			*page = (struct page){ .kind = NONE };
		else if (page->wipe == YES)
			pristine(page);
		else if (page->wipe == MAYBE)
			page->unknown = true;
	}
	/* What may have stayed with the parent is done away with. */
	for (i = 0; i < nr_pages; i++) {
		if (pages[i].dontfork != MAYBE)
			continue;
		SYS(munmap, address(i), PAGE);
		pages[i] = (struct page){ .kind = NONE };
	}
}

static void op_fork(void)
{
	const unsigned long number = between(2, 24), meanwhile = between(0, 6);
	const uint64_t of_child = rng();
	unsigned int status = 0;
	unsigned long i;
	long pid = SYS(fork), ret;

	if (count(FORK, pid))
		return;
	if (!pid) {
		rng_state = of_child;
		become_child();
		if (percent(25))
			check_mappings();
		for (i = 0; i < number; i++)
			one_operation(depth < MAX_DEPTH);
		check_some(0, nr_pages, 48);
		leave(KZ_OK);
	}
	/* Side by side, so that it matters who copies a page. */
	for (i = 0; i < meanwhile; i++)
		one_operation(false);
	do {
		ret = SYS(wait4, pid, &status, 0, 0);
	} while (ret == -EINTR);
	current_op = FORK;
	if ((status & 127) == 9)
		/* Out of memory. */
		__atomic_add_fetch(&shared->killed, 1, __ATOMIC_RELAXED);
	else if (status & 127)
		violation("a child was killed", ~0UL, 0, status & 127, 0);
	else if (status >> 8 & 255) {
		/* It has told. */
		if (!depth)
			report();
		leave(KZ_FAILED);
	}
	check_some(0, nr_pages, 16);
}

static void one_operation(bool may_fork)
{
	const unsigned int dice = (unsigned int)(rng() % 100);

	if (dice < 8)
		op_create();
	else if (dice < 14)
		op_fd();
	else if (dice < 25)
		op_mmap();
	else if (dice < 30)
		op_mmap_other();
	else if (dice < 33)
		op_munmap();
	else if (dice < 42)
		op_mremap();
	else if (dice < 48)
		op_mprotect();
	else if (dice < 64)
		op_madvise();
	else if (dice < 69)
		op_lock();
	else if (dice < 73)
		op_read_many();
	else if (dice < 85)
		op_write();
	else if (dice < 97 || !may_fork)
		op_read();
	else
		op_fork();
}

/*
 * The program.
 */
/* Without --seconds, --steps says exactly how many. */
static unsigned long seconds, least_steps;

static void report(void)
{
	const char *separator;
	int op, error;

	out.used = 0;
	put("{\"seed\": %u, \"seconds\": %u, \"steps\": %u, \"pages\": %u, \"checked_pages\": %u, "
	    "\"children_killed\": %u, \"violations\": %u, \"operations\": {",
	    seed, seconds, step, nr_pages, shared->checked_pages, shared->killed, shared->violations);
	for (op = 0; op < NR_OPS; op++) {
		put("%s\"%s\": {", op ? ", " : "", op_names[op]);
		separator = "";
		for (error = 0; error < MAX_ERRNO; error++) {
			if (!shared->count[op][error])
				continue;
			if (error_names[error])
				put("%s\"%s\": ", separator, error_names[error]);
			else
				put("%s\"errno %d\": ", separator, (long)error);
			put("%u", shared->count[op][error]);
			separator = ", ";
		}
		put("}");
	}
	put("}}\n");
	out_flush(1);
}

static void *area(unsigned long size, unsigned int flags, unsigned long at)
{
	long ret = SYS(mmap, at, size, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);

	if (ret < 0 && ret > -4096)
		die(KZ_BROKEN, "mmap of %u bytes: errno %u", size, (unsigned long)-ret);
	return (void *)ret;
}

static void set_up(void)
{
	long ret;
	int i;

	ret = SYS(refpage_create, "a", 1, 0);
	if (ret < 0)
		die(KZ_BROKEN, "refpage_create: errno %u%s", (unsigned long)-ret,
		    ret == -ENOSYS ? "; this kernel does not have it" : "");
	SYS(close, ret);
	shared = area(sizeof(*shared), MAP_SHARED, 0);
	pages = area(nr_pages * sizeof(*pages), MAP_PRIVATE, 0);
	area(2 * PAGE, MAP_PRIVATE | MAP_FIXED_NOREPLACE, SOURCE);
	for (i = 0; i < NR_FILES; i++)
		files[i].fd = -1;
	ret = SYS(memfd_create, "scratch", MFD_CLOEXEC);
	if (ret < 0 || SYS(ftruncate, ret, (MAX_DEPTH + 1) * PAGE))
		die(KZ_BROKEN, "memfd_create: errno %u", (unsigned long)-ret);
	scratch = (int)ret;
	catch_faults();
}

/* Most of the area is mapped from the start: calls over holes alone show little. */
static void first_mappings(void)
{
	unsigned long at = 0;
	int i;

	rng_state = mix(~(uint64_t)seed);
	for (i = 0; i < NR_FILES / 2; i++)
		create_good();
	while (at < nr_pages) {
		struct range r = { at, between(1, nr_pages - at > 64 ? 64 : nr_pages - at) };

		if (percent(90))
			map_file(r, (int)(rng() % (NR_FILES / 2)));
		at += r.number;
	}
}

static void fuzz(void)
{
	const uint64_t end = now_ns() + seconds * 1000000000ULL;

	first_mappings();
	for (step = 0; step < least_steps || (seconds && now_ns() < end); step++) {
		rng_state = mix(mix(seed) + step);
		one_operation(true);
		if (step % 64 == 63)
			check_mappings();
		if (step % 512 == 511)
			check_some(0, nr_pages, nr_pages);
	}
	check_mappings();
	check_some(0, nr_pages, nr_pages);
}

static void usage(int fd)
{
	put(
"usage: refpage_fuzz [options]\n"
"Random system calls around refpage_create(2), checked against a model; one JSON line at the end.\n"
"  --seconds S         how long (default 10, and 0 with --steps)\n"
"  --steps N           not less than so many steps, however long they take\n"
"  --seed N            the random choices (default 1)\n"
"  --pages N           size of the area it works on, 16 to 1048576 pages (default 1024)\n"
"  --break-model WHAT  expect something wrong from step 50 on, to see that it fails:\n"
"                      content, access or errno\n"
"  --help              this text\n"
"A violation is a JSON line with the seed and the step; --seed and --steps repeat it.\n"
"Exit: 0 all as expected, 1 a violation, 2 bad usage, 3 the machine cannot do it.\n");
	out_flush(fd);
}

static unsigned long number(const char *option, const char *text, unsigned long min,
			    unsigned long max)
{
	unsigned long value = 0;
	const char *p = text;

	for (; *p >= '0' && *p <= '9' && value <= (max - (unsigned long)(*p - '0')) / 10; p++)
		value = value * 10 + (unsigned long)(*p - '0');
	if (p == text || *p || value < min || value > max)
		die(KZ_USAGE, "%s: '%s' is not a whole number from %u to %u; see --help", option, text, min,
		    max);
	return value;
}

static int run(int argc, char **argv)
{
	int i;

	for (i = 1; i < argc; i++) {
		const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;

		if (same_text(option, "--help")) {
			usage(1);
			return KZ_OK;
		}
		if (!starts_with(option, "--"))
			die(KZ_USAGE, "'%s' is left over; see --help", option);
		if (!same_text(option, "--seconds") && !same_text(option, "--steps") &&
		    !same_text(option, "--seed") && !same_text(option, "--pages") &&
		    !same_text(option, "--break-model"))
			die(KZ_USAGE, "%s: there is no such option; see --help", option);
		if (!value)
			die(KZ_USAGE, "%s: a value is missing; see --help", option);
		i++;
		if (same_text(option, "--seconds"))
			seconds = number(option, value, 1, 1000000);
		else if (same_text(option, "--steps"))
			least_steps = number(option, value, 1, 1000000000000UL);
		else if (same_text(option, "--seed"))
			seed = number(option, value, 0, ~0UL / 2);
		else if (same_text(option, "--pages"))
			nr_pages = number(option, value, 16, 1UL << 20);
		else if (same_text(value, "content"))
			break_model = BREAK_CONTENT;
		else if (same_text(value, "access"))
			break_model = BREAK_ACCESS;
		else if (same_text(value, "errno"))
			break_model = BREAK_ERRNO;
		else
			die(KZ_USAGE, "--break-model: '%s' is not content, access or errno; see --help",
			    value);
	}
	if (!seconds && !least_steps)
		seconds = 10;
	set_up();
	fuzz();
	report();
	return KZ_OK;
}

void start(long *stack) __attribute__((noreturn, used));

void start(long *stack)
{
	leave(run((int)stack[0], (char **)(stack + 1)));
}

__asm__(".text\n"
	".globl _start\n"
	"_start:\n"
	"	xor	%ebp, %ebp\n"
	"	mov	%rsp, %rdi\n"
	"	and	$-16, %rsp\n"
	"	call	start\n");
