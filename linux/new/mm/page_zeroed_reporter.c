// SPDX-License-Identifier: GPL-2.0
/*
 * A page reporter for tests. Instead of a hypervisor it is this driver that
 * free memory is reported to, and it zeroes it or not, and tells the truth about
 * that or not, as page_zeroed_reporter.mode says.
 */
#define pr_fmt(fmt) "page_zeroed_reporter: " fmt

#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/err.h>
#include <linux/highmem.h>
#include <linux/init.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/page_reporting.h>
#include <linux/scatterlist.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "page_zeroed.h"

enum reporter_mode {
	REPORTER_OFF,		/* not registered */
	REPORTER_HONEST,	/* zeroes each block and says so */
	REPORTER_LIE,		/* says so, and does nothing */
	REPORTER_PARTIAL,	/* zeroes every second one, and half of the others */
	REPORTER_ERROR,		/* zeroes every second one, then fails */
};

static const char * const reporter_modes[] = {
	[REPORTER_OFF]		= "off",
	[REPORTER_HONEST]	= "honest",
	[REPORTER_LIE]		= "lie",
	[REPORTER_PARTIAL]	= "partial",
	[REPORTER_ERROR]	= "error",
};

/* Written with the lock for parameters held, or before there are others. */
static enum reporter_mode reporter_mode;
static bool reporter_ready;

static int reporter_order = PAGE_REPORTING_ORDER_UNSPECIFIED;
module_param_named(order, reporter_order, int, 0444);
MODULE_PARM_DESC(order, "Order of the smallest blocks to be reported");

static int reporter_count_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%lld\n", atomic64_read(kp->arg));
}

static const struct kernel_param_ops reporter_count_ops = {
	.get = reporter_count_get,
};

static atomic64_t reporter_calls;
module_param_cb(calls, &reporter_count_ops, &reporter_calls, 0444);
MODULE_PARM_DESC(calls, "How often there was something reported");

static atomic64_t reporter_blocks;
module_param_cb(blocks, &reporter_count_ops, &reporter_blocks, 0444);
MODULE_PARM_DESC(blocks, "How many blocks were reported");

static atomic64_t reporter_confirmed;
module_param_cb(confirmed, &reporter_count_ops, &reporter_confirmed, 0444);
MODULE_PARM_DESC(confirmed, "How many of them were said to be zero");

static void reporter_zero(struct page *page, unsigned int nr)
{
	unsigned int i;

	/* With debug_pagealloc free memory is not mapped. */
	debug_pagealloc_map_pages(page, nr);
	for (i = 0; i < nr; i++)
		page_zeroed_clear_free(page + i);
	debug_pagealloc_unmap_pages(page, nr);
}

static int reporter_report(struct page_reporting_dev_info *prdev,
			   struct scatterlist *sgl, unsigned int nents)
{
	const enum reporter_mode mode = READ_ONCE(reporter_mode);
	struct scatterlist *sg;
	unsigned int i;

	atomic64_inc(&reporter_calls);
	atomic64_add(nents, &reporter_blocks);

	for_each_sg(sgl, sg, nents, i) {
		const unsigned int nr = sg->length >> PAGE_SHIFT;
		bool zero = true, confirm = true;

		switch (mode) {
		case REPORTER_OFF:
			/* On the way out. */
			zero = false;
			confirm = false;
			break;
		case REPORTER_HONEST:
			break;
		case REPORTER_LIE:
			zero = false;
			break;
		case REPORTER_PARTIAL:
			confirm = i % 2;
			break;
		case REPORTER_ERROR:
			/* The bits mean nothing then, and must not be looked at. */
			zero = i % 2;
			break;
		}

		if (zero)
			reporter_zero(sg_page(sg), confirm ? nr : DIV_ROUND_UP(nr, 2));
		if (confirm) {
			__set_bit(i, prdev->zeroed);
			if (mode != REPORTER_ERROR)
				atomic64_inc(&reporter_confirmed);
		}
	}

	return mode == REPORTER_ERROR ? -EIO : 0;
}

static struct page_reporting_dev_info reporter_prdev = {
	.report = reporter_report,
};

static int reporter_switch(enum reporter_mode mode)
{
	const enum reporter_mode old = reporter_mode;
	int err;

	/* Zeros would be taken for corruption. */
	if (mode != REPORTER_OFF && page_poisoning_enabled_static()) {
		pr_err("free pages are poisoned, so they cannot be zeroed; boot with page_poison=0\n");
		return -EOPNOTSUPP;
	}

	/* A report that is under way may be part of the old, part of the new. */
	WRITE_ONCE(reporter_mode, mode);
	if (!mode == !old)
		return 0;

	if (mode == REPORTER_OFF) {
		page_reporting_unregister(&reporter_prdev);
		return 0;
	}

	/* Registration clears the one if zeros are of no use. */
	reporter_prdev.tells_zeroed = true;
	reporter_prdev.order = reporter_order;
	err = page_reporting_register(&reporter_prdev);
	if (err) {
		WRITE_ONCE(reporter_mode, REPORTER_OFF);
		pr_err("cannot register: %pe%s\n", ERR_PTR(err), err == -EBUSY ?
		       "; there is another reporter, such as virtio_balloon" : "");
	}
	return err;
}

static int reporter_mode_set(const char *val, const struct kernel_param *kp)
{
	int mode = sysfs_match_string(reporter_modes, val);

	if (mode < 0)
		return mode;

	/* On the command line, before anything can be registered. */
	if (!reporter_ready) {
		reporter_mode = mode;
		return 0;
	}

	return reporter_switch(mode);
}

static int reporter_mode_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%s\n", reporter_modes[reporter_mode]);
}

static const struct kernel_param_ops reporter_mode_ops = {
	.set = reporter_mode_set,
	.get = reporter_mode_get,
};

module_param_cb(mode, &reporter_mode_ops, NULL, 0644);
MODULE_PARM_DESC(mode, "What the reporter does: off, honest, lie, partial or error");

static int __init reporter_init(void)
{
	enum reporter_mode mode;
	int err;

	kernel_param_lock(THIS_MODULE);
	mode = reporter_mode;
	reporter_mode = REPORTER_OFF;
	reporter_ready = true;
	err = reporter_switch(mode);
	kernel_param_unlock(THIS_MODULE);

	return err;
}
late_initcall(reporter_init);
