// SPDX-License-Identifier: GPL-2.0
/*
 * Zero free hugetlb folios before anyone wants them.
 *
 * Were a folio taken out of the pool for that, it would be missed by those who
 * find the pool empty meanwhile: they are not told to wait, but fail. So it
 * stays on the free list, and whoever takes it off there takes it from who
 * zeroes it: a few pages at a time are zeroed under a lock, and only if nobody
 * has. Nobody ever waits for more than that.
 */
#include <linux/highmem.h>
#include <linux/hugetlb.h>
#include <linux/list.h>
#include <linux/lockdep.h>
#include <linux/mm.h>
#include <linux/page-isolation.h>
#include <linux/sched.h>
#include <linux/spinlock.h>

#include "hugetlb_zeroed.h"
#include "page_zeroed.h"

/* Folios that are looked at. The dirty ones are at the end of the list. */
#define HUGETLB_ZEROING_SCANS	32

/* Nests in hugetlb_lock. */
static DEFINE_SPINLOCK(hugetlb_zeroing_lock);

/* What is being zeroed. Set with hugetlb_lock held, cleared with both. */
static struct folio *hugetlb_zeroing[MAX_NUMNODES];

static void hugetlb_zeroing_end(int nid)
{
	lockdep_assert_held(&hugetlb_lock);

	guard(spinlock)(&hugetlb_zeroing_lock);

	WRITE_ONCE(hugetlb_zeroing[nid], NULL);
}

/**
 * hugetlb_zeroing_cancel - See to it that nobody zeroes a folio any more
 * @folio: a folio on a free list, or one that just was
 *
 * For everybody who is about to take it off the list, or finds an error in it.
 *
 * Context: hugetlb_lock is held.
 */
void hugetlb_zeroing_cancel(struct folio *folio)
{
	const int nid = folio_nid(folio);

	lockdep_assert_held(&hugetlb_lock);

	if (unlikely(hugetlb_zeroing[nid] == folio))
		hugetlb_zeroing_end(nid);
}

static struct folio *hugetlb_zeroing_begin(struct hstate *h, int nid)
{
	unsigned int scans = HUGETLB_ZEROING_SCANS;
	struct folio *folio;

	if (!page_zeroed_tracked() || !page_zeroed_trusted(PAGE_ZEROED_PREZEROED))
		return NULL;

	guard(spinlock_irq)(&hugetlb_lock);

	/* One at a time. */
	if (hugetlb_zeroing[nid])
		return NULL;

	list_for_each_entry_reverse(folio, &h->hugepage_freelists[nid], lru) {
		if (!scans--)
			break;
		if (hugetlb_zeroed_sources(folio) || folio_test_hwpoison(folio) ||
		    is_migrate_isolate_page(&folio->page))
			continue;

		WRITE_ONCE(hugetlb_zeroing[nid], folio);
		return folio;
	}

	return NULL;
}

/* Zero some pages. Returns false if the folio has been taken from us. */
static bool hugetlb_zeroing_step(struct folio *folio, int nid, unsigned long first)
{
	unsigned int i;

	guard(spinlock_irq)(&hugetlb_zeroing_lock);

	if (hugetlb_zeroing[nid] != folio)
		return false;

	for (i = 0; i < HUGETLB_ZEROING_STEP; i++)
		clear_highpage_kasan_tagged(folio_page(folio, first + i));

	return true;
}

/**
 * hugetlb_zero_free - Zero a free folio, so that it is known to be zero
 * @h: which size
 * @nid: which node
 * @stop: returns whether to stop, is called before each HUGETLB_ZEROING_STEP
 *	  pages; or NULL
 * @data: for @stop
 *
 * The folio remains free all the time, and whoever wants it gets it: then the
 * work is lost. @stop may sleep.
 *
 * Only one caller for each node at a time: what one has begun, another might
 * finish after the folio was taken and given back in between.
 *
 * Context: Process context. May sleep. Takes hugetlb_lock, not for long.
 * Return: How many pages have become known to be zero. 0 if there is nothing to
 *	   do, -EAGAIN if the folio was taken meanwhile, and -EINTR if @stop said
 *	   so.
 */
long hugetlb_zero_free(struct hstate *h, int nid, bool (*stop)(void *data),
		       void *data)
{
	const unsigned long nr_pages = pages_per_huge_page(h);
	struct folio *folio = hugetlb_zeroing_begin(h, nid);
	bool stopped = false;
	unsigned long i;

	if (!folio)
		return 0;

	for (i = 0; i < nr_pages; i += HUGETLB_ZEROING_STEP) {
		stopped = stop && stop(data);
		if (stopped)
			break;
		if (!hugetlb_zeroing_step(folio, nid, i))
			return -EAGAIN;
		cond_resched();
	}

	guard(spinlock_irq)(&hugetlb_lock);

	if (hugetlb_zeroing[nid] != folio)
		return stopped ? -EINTR : -EAGAIN;

	hugetlb_zeroing_end(nid);
	if (stopped)
		return -EINTR;

	hugetlb_zeroed_mark(folio, BIT(PAGE_ZEROED_PREZEROED));
	count_vm_events(PGZEROED_SET_PREZEROED, nr_pages);
	/* To be taken first. */
	list_move(&folio->lru, &h->hugepage_freelists[nid]);
	return nr_pages;
}
