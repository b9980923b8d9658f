// SPDX-License-Identifier: GPL-2.0
/*
 * Known-zero pages: when to believe that a free page is zero, and what to do
 * about those who said so wrongly.
 *
 * The rules that the page allocator follows on its hot paths are in
 * mm/page_zeroed.h; what is here runs only for blocks that are, or were, or are
 * about to be, known zero.
 */
#define pr_fmt(fmt) "page_zeroed: " fmt

#include <kunit/static_stub.h>
#include <kunit/visibility.h>
#include <linux/cacheinfo.h>
#include <linux/cc_platform.h>
#include <linux/export.h>
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/mmdebug.h>
#include <linux/moduleparam.h>
#include <linux/panic.h>
#include <linux/percpu.h>
#include <linux/printk.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/vmstat.h>

#include "internal.h"
#include "page_zeroed.h"

#define CREATE_TRACE_POINTS
#include <trace/events/page_zeroed.h>

DEFINE_STATIC_KEY_FALSE(page_zeroed_active);
/*
 * Whether all code has been patched for that. Until then some of it may not
 * look at what a block is marked with, so none may be.
 */
static bool page_zeroed_ready;
DEFINE_STATIC_KEY_MAYBE(CONFIG_PAGE_ZEROED_DEBUG, page_zeroed_verify_enabled);

/* BIT(enum page_zeroed_source) of those who lied. Bits are only ever set. */
VISIBLE_IF_KUNIT unsigned long page_zeroed_distrusted;

/**
 * page_zeroed_obstacle - Why free pages cannot be known to be zero here
 *
 * Drivers ask before they offer to say which pages are zero.
 *
 * Context: Any, once the boot parameters have been parsed.
 * Return: %NULL if nothing is in the way, else the reason, for the log.
 */
const char *page_zeroed_obstacle(void)
{
#ifdef HAVE_ARCH_FREE_PAGE
	/* s390 and pseries let the hypervisor drop what is in a free page. */
	return "the architecture gives free pages to the hypervisor";
#endif
	if (page_poisoning_enabled_static())
		return "free pages are poisoned (page_poison=1)";
	if (want_init_on_free())
		return "free pages are zero anyway (init_on_free=1)";
	/* Zeros that the host wrote need not be what the user's alias shows. */
	if (cpu_dcache_is_aliasing() || cpu_icache_is_aliasing())
		return "the caches alias";
	/* The host's zeros do not decrypt to zeros, and it may not be trusted. */
	if (cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT) ||
	    cc_platform_has(CC_ATTR_MEM_ENCRYPT))
		return "memory is encrypted";

	return NULL;
}
EXPORT_SYMBOL_GPL(page_zeroed_obstacle);

/**
 * page_zeroed_enable - Let the page allocator track known-zero blocks
 *
 * To be called before the first block is claimed to be zero. There is no way
 * back: blocks that are known zero remain so when their source goes away.
 *
 * Context: Process context, may sleep.
 * Return: 0, or -EOPNOTSUPP if page_zeroed_obstacle() has a reason not to.
 */
int page_zeroed_enable(void)
{
	const char *obstacle = page_zeroed_obstacle();

	if (obstacle) {
		pr_info("not tracking known-zero pages: %s\n", obstacle);
		return -EOPNOTSUPP;
	}

	static_branch_enable(&page_zeroed_active);
	/* Pairs with the acquire in page_zeroed_claim(). */
	smp_store_release(&page_zeroed_ready, true);
	return 0;
}

/**
 * page_zeroed_trusted - May a source still say what is zero?
 * @source: which
 *
 * Context: Any.
 * Return: %false once it was caught lying: its claims are ignored then.
 */
bool page_zeroed_trusted(enum page_zeroed_source source)
{
	return !(READ_ONCE(page_zeroed_distrusted) & BIT(source));
}

static void page_zeroed_count(enum vm_event_item first, unsigned int sources,
			      unsigned int order)
{
	count_vm_events(first + __ffs(sources), 1 << order);
}

/* @nr more pages in the zone of @page are free and known to be zero. */
void page_zeroed_account(struct page *page, long nr)
{
	mod_zone_page_state(page_zone(page), NR_FREE_ZEROED, nr);
}

/* What was known of @nr pages that are no longer accounted for is lost. */
void page_zeroed_count_lost(unsigned long nr)
{
	count_vm_events(PGZEROED_LOST, nr);
}

/**
 * page_zeroed_claim - Say that a block is zero
 * @page: head page of the block
 * @order: order of the block
 * @source: who says so
 *
 * Whatever the block was known as before is replaced. Does nothing unless
 * page_zeroed_enable() has succeeded, or if @source was caught lying.
 *
 * Context: Any. The block is isolated from the page allocator, or about to
 *	    enter it with all processing of freed pages done; nobody will write
 *	    to it while it is free.
 */
void page_zeroed_claim(struct page *page, unsigned int order,
		       enum page_zeroed_source source)
{
	unsigned int sources = BIT(source);
	bool known;

	VM_WARN_ON_ONCE_PAGE(PageBuddy(page), page);

	/* Those who free what they have not used do not ask to enable it. */
	if (!smp_load_acquire(&page_zeroed_ready))
		return;

	known = page_zeroed_take(page);
	if (!page_zeroed_trusted(source)) {
		if (known)
			page_zeroed_lose(page, order, PAGE_ZEROED_LOST_DISTRUST);
		return;
	}

	page_zeroed_mark(page, sources);
	if (known)
		return;

	page_zeroed_account(page, 1L << order);
	page_zeroed_count(PGZEROED_SET_REPORTED, sources, order);
	trace_page_zeroed_set(page, order, sources);
}

/**
 * page_zeroed_consume - Count a known-zero block that is put to use
 * @page: head page of the block
 * @order: order of the block
 * @sources: mask of those who say that it is zero, not 0
 * @wanted: whether its new owner wants zeros
 *
 * Context: Any, NMI included.
 * Return: %true if the block need not be zeroed.
 */
bool page_zeroed_consume(struct page *page, unsigned int order,
			 unsigned int sources, bool wanted)
{
	if (unlikely(READ_ONCE(page_zeroed_distrusted) & sources)) {
		page_zeroed_count_lost(1UL << order);
		trace_page_zeroed_lost(page, order, PAGE_ZEROED_LOST_DISTRUST);
		return false;
	}

	if (!wanted) {
		count_vm_events(PGZEROED_UNWANTED, 1 << order);
		trace_page_zeroed_unwanted(page, order, sources);
		return false;
	}

	page_zeroed_count(PGZEROED_SKIP_REPORTED, sources, order);
	trace_page_zeroed_skip(page, order, sources);
	return true;
}

/**
 * page_zeroed_lose - Account for a block that is no longer known zero
 * @page: head page of the block
 * @order: order of the block
 * @reason: why it is not
 *
 * Context: Any, NMI included.
 */
void page_zeroed_lose(struct page *page, unsigned int order,
		      enum page_zeroed_loss reason)
{
	page_zeroed_account(page, -(1L << order));
	page_zeroed_count_lost(1UL << order);
	trace_page_zeroed_lost(page, order, reason);
}

/**
 * page_zeroed_forget_all - Forget what is known of all memory on the free lists
 *
 * For resume from hibernation: the image holds the struct pages, but not what
 * is in free pages. They hold what the kernel that loaded the image left there.
 *
 * Context: Takes every zone->lock.
 */
void page_zeroed_forget_all(void)
{
	struct zone *zone;

	if (!page_zeroed_tracked())
		return;

	for_each_populated_zone(zone) {
		unsigned int order, mt;

		guard(spinlock_irqsave)(&zone->lock);

		for (order = 0; order < NR_PAGE_ORDERS; order++) {
			for (mt = 0; mt < MIGRATE_TYPES; mt++) {
				struct page *page;

				list_for_each_entry(page,
					&zone->free_area[order].free_list[mt],
					buddy_list)
					page_zeroed_drop(page, order,
						PAGE_ZEROED_LOST_RESUME);
			}
		}
	}
}

/*
 * The check. With CONFIG_PAGE_ZEROED_DEBUG every skip is checked from the start;
 * otherwise one in page_zeroed.verify is, and none by default.
 */
VISIBLE_IF_KUNIT unsigned int page_zeroed_verify_interval =
	IS_ENABLED(CONFIG_PAGE_ZEROED_DEBUG) ? 1 : 0;
static DEFINE_PER_CPU(unsigned int, page_zeroed_skips);

static int page_zeroed_verify_set(const char *val, const struct kernel_param *kp)
{
	int err = param_set_uint(val, kp);

	if (err)
		return err;

	/* The parameter lock makes us the only one here. */
	if (page_zeroed_verify_interval)
		static_branch_enable(&page_zeroed_verify_enabled);
	else
		static_branch_disable(&page_zeroed_verify_enabled);

	return 0;
}

static const struct kernel_param_ops page_zeroed_verify_ops = {
	.set = page_zeroed_verify_set,
	.get = param_get_uint,
};

module_param_cb(verify, &page_zeroed_verify_ops, &page_zeroed_verify_interval,
		0644);
MODULE_PARM_DESC(verify, "Check one in N blocks whose zeroing is skipped, 0: none");

/* Returns the offset of the first byte that is not zero, or PAGE_SIZE. */
static unsigned int page_first_nonzero(struct page *page)
{
	void *kaddr = kmap_local_page(page);
	void *bad = memchr_inv(kaddr, 0, PAGE_SIZE);
	unsigned int offset = bad ? bad - kaddr : PAGE_SIZE;

	kunmap_local(kaddr);
	return offset;
}

VISIBLE_IF_KUNIT void page_zeroed_report(struct page *page, unsigned int order,
					 unsigned int sources, struct page *bad,
					 unsigned int offset)
{
	KUNIT_STATIC_STUB_REDIRECT(page_zeroed_report, page, order, sources,
				   bad, offset);

	pr_err("BUG: pfn 0x%lx is not zero at byte %u, in a block of order %u at pfn 0x%lx that [%s%s%s%s ] vouched for; allocated by %s/%d\n",
	       page_to_pfn(bad), offset, order, page_to_pfn(page),
	       sources & BIT(PAGE_ZEROED_REPORTED) ? " reported" : "",
	       sources & BIT(PAGE_ZEROED_FREED) ? " freed" : "",
	       sources & BIT(PAGE_ZEROED_INFLATED) ? " inflated" : "",
	       sources & BIT(PAGE_ZEROED_PREZEROED) ? " prezeroed" : "",
	       current->comm, task_pid_nr(current));
	dump_page(bad, "known zero, but is not");
	dump_stack();
	trace_page_zeroed_bad(page, order, sources);
	count_vm_events(PGZEROED_BAD, 1 << order);
	add_taint(TAINT_BAD_PAGE, LOCKDEP_STILL_OK);
}

static void page_zeroed_distrust(unsigned int sources)
{
	/*
	 * What was freed as zeros may have been handed out as zeros on the word
	 * of any other source: it falls with them, and takes all of them along.
	 */
	if (sources & BIT(PAGE_ZEROED_FREED))
		sources = PAGE_ZEROED_SOURCES;
	else
		sources |= BIT(PAGE_ZEROED_FREED);
	/* Atomic; test_and_set_bit() and the like take one bit only. */
	set_mask_bits(&page_zeroed_distrusted, 0, (unsigned long)sources);
}

/**
 * __page_zeroed_verify - Check a block whose zeroing was skipped
 * @page: head page of the block
 * @order: order of the block
 * @sources: mask of those on whose word it was skipped, not 0
 *
 * If the block is not zero: report it, zero it, and never believe any of
 * @sources again, nor those who may have passed on what they said.
 *
 * Context: Any, NMI included. The block is mapped, and KASAN lets us read it.
 */
void __page_zeroed_verify(struct page *page, unsigned int order,
			  unsigned int sources)
{
	unsigned int interval = READ_ONCE(page_zeroed_verify_interval);
	unsigned int i, offset;

	if (!interval || this_cpu_inc_return(page_zeroed_skips) % interval)
		return;

	for (i = 0; i < 1U << order; i++) {
		offset = page_first_nonzero(page + i);
		if (offset < PAGE_SIZE)
			break;
	}
	if (likely(i == 1U << order))
		return;

	page_zeroed_distrust(sources);
	page_zeroed_report(page, order, sources, page + i, offset);
	for (i = 0; i < 1U << order; i++)
		clear_highpage_kasan_tagged(page + i);
}
