// SPDX-License-Identifier: GPL-2.0
/*
 * Free blocks by zone and order, and what is known of them, for people who want
 * to see whether free memory is reported and known to be zero.
 */
#include <linux/debugfs.h>
#include <linux/init.h>
#include <linux/memory_hotplug.h>
#include <linux/mmzone.h>
#include <linux/pageblock-flags.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>

#include "internal.h"
#include "page_alloc.h"
#include "page_reporting.h"
#include "page_zeroed.h"

struct free_blocks {
	unsigned long free[NR_PAGE_ORDERS];
	unsigned long reported[NR_PAGE_ORDERS];
	unsigned long zeroed[NR_PAGE_ORDERS];
};

/*
 * Count the blocks on free lists whose heads are in the pageblock from @pfn to
 * @end. Returns where the next block may start: the last one can be larger than
 * the pageblock.
 */
static unsigned long count_pageblock(struct zone *zone, unsigned long pfn,
				     unsigned long end,
				     struct free_blocks *found)
{
	unsigned long flags;

	spin_lock_irqsave(&zone->lock, flags);
	while (pfn < end) {
		struct page *page = pfn_to_page(pfn);
		unsigned int order;

		if (!PageBuddy(page)) {
			pfn++;
			continue;
		}
		order = buddy_order(page);
		found->free[order]++;
		if (page_reported(page))
			found->reported[order]++;
		if (page_zeroed_sources(page))
			found->zeroed[order]++;
		pfn += 1UL << order;
	}
	spin_unlock_irqrestore(&zone->lock, flags);

	return pfn;
}

/*
 * Page by page and not along the lists, so that zone->lock is never held for more
 * than a pageblock, however much memory is free.
 */
static void count_zone(struct zone *zone, struct free_blocks *found)
{
	unsigned long pfn, end;

	get_online_mems();
	for (pfn = zone->zone_start_pfn; pfn < zone_end_pfn(zone);
	     pfn = max(pfn, end)) {
		end = min(pageblock_end_pfn(pfn), zone_end_pfn(zone));
		if (pageblock_pfn_to_page(pfn, end, zone))
			pfn = count_pageblock(zone, pfn, end, found);
		cond_resched();
	}
	put_online_mems();
}

static void show_orders(struct seq_file *m, struct zone *zone, const char *what,
			const unsigned long *blocks)
{
	unsigned int order;

	seq_printf(m, "Node %d, zone %8s %8s", zone_to_nid(zone), zone->name,
		   what);
	for (order = 0; order < NR_PAGE_ORDERS; order++)
		seq_printf(m, " %6lu", blocks[order]);
	seq_putc(m, '\n');
}

static int free_blocks_show(struct seq_file *m, void *v)
{
	struct free_blocks found = {};

	count_zone(v, &found);
	show_orders(m, v, "free", found.free);
	show_orders(m, v, "reported", found.reported);
	show_orders(m, v, "zeroed", found.zeroed);

	return 0;
}

static void *free_blocks_start(struct seq_file *m, loff_t *pos)
{
	struct zone *zone;
	loff_t left = *pos;

	for_each_populated_zone(zone)
		if (!left--)
			return zone;

	return NULL;
}

static void *free_blocks_next(struct seq_file *m, void *v, loff_t *pos)
{
	++*pos;
	return free_blocks_start(m, pos);
}

static void free_blocks_stop(struct seq_file *m, void *v)
{
}

static const struct seq_operations free_blocks_sops = {
	.start	= free_blocks_start,
	.next	= free_blocks_next,
	.stop	= free_blocks_stop,
	.show	= free_blocks_show,
};
DEFINE_SEQ_ATTRIBUTE(free_blocks);

static int __init page_zeroed_debugfs_init(void)
{
	struct dentry *dir = debugfs_create_dir("page_zeroed", NULL);

	debugfs_create_file("free_blocks", 0400, dir, NULL, &free_blocks_fops);

	return 0;
}
late_initcall(page_zeroed_debugfs_init);
