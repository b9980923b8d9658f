// SPDX-License-Identifier: GPL-2.0
/*
 * kzeropaged: zero free memory before anyone wants it.
 *
 * There is a thread for each node with memory. It takes a few free blocks at a
 * time off the free lists, zeroes them, claims them to be known zero, and puts
 * them back. It runs when the CPU has nothing else to do (SCHED_IDLE), a batch at
 * a time with a pause between batches, and not at all while there is nothing to
 * do: then it sleeps until enough memory has been freed.
 *
 * It leaves alone what it would do harm to: blocks that the hypervisor was told
 * are free, since writing to them takes the memory back from it; whatever
 * will be reported to the hypervisor, since that ends what is known of it, or
 * makes it known anyway; isolated blocks; the reserve for atomic allocations of
 * high order; and pages with hardware errors.
 *
 * When asked, it then zeroes the free folios of the hugetlb pools, which remain
 * where they are meanwhile.
 *
 * See Documentation/admin-guide/mm/prezero.rst.
 */
#define pr_fmt(fmt) "prezero: " fmt

#include <kunit/visibility.h>
#include <linux/atomic.h>
#include <linux/cpumask.h>
#include <linux/freezer.h>
#include <linux/highmem.h>
#include <linux/hugetlb.h>
#include <linux/init.h>
#include <linux/irq_work.h>
#include <linux/kobject.h>
#include <linux/kstrtox.h>
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/math64.h>
#include <linux/memory.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/page_zeroed.h>
#include <linux/printk.h>
#include <linux/sched.h>
#include <linux/sched/cputime.h>
#include <linux/slab.h>
#include <linux/suspend.h>
#include <linux/sysfs.h>
#include <linux/vmstat.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <uapi/linux/sched/types.h>

#include "hugetlb_zeroed.h"
#include "internal.h"
#include "page_alloc.h"
#include "page_reporting.h"
#include "page_zeroed.h"
#include "prezero.h"

/* Free list entries that are looked at in one go, with zone->lock held. */
#define PREZERO_SCANS		32

/* What is isolated at once: so many blocks, and no more memory than that. */
#define PREZERO_BLOCKS		16
#define PREZERO_PAGES		(SZ_2M >> PAGE_SHIFT)

/* To free less dirty memory than that is no reason to wake up. */
#define PREZERO_WAKE_PAGES	(SZ_4M >> PAGE_SHIFT)

/* All free lists of a node, the blocks of the highest order first. */
#define PREZERO_ZONE_LISTS	(NR_PAGE_ORDERS * MIGRATE_TYPES)
#define PREZERO_LISTS		(MAX_NR_ZONES * PREZERO_ZONE_LISTS)

DEFINE_STATIC_KEY_FALSE(prezero_active);

/* Held to change any of the following, and to start and stop threads. */
static DEFINE_MUTEX(prezero_mutex);
static bool prezero_enabled;
static cpumask_t prezero_cpus;		/* empty: those of the node */

/*
 * The per-CPU lists keep what is smaller, and what comes from them soon goes
 * back, hot in the cache.
 */
static unsigned int prezero_mini_order = PAGE_ALLOC_COSTLY_ORDER + 1;
static unsigned int prezero_delay_ms = MSEC_PER_SEC;
static unsigned long prezero_batch_size = SZ_64M;
static unsigned long prezero_max_rate;	/* bytes a second, 0: no limit */
#ifdef CONFIG_HUGETLB_PAGE
static bool prezero_hugetlb;		/* the free folios of the pools, too */
#endif

struct prezero_node {
	struct kobject kobj;
	int nid;
	struct task_struct *task;	/* prezero_mutex */

	wait_queue_head_t wait;		/* until there is something to do */
	wait_queue_head_t pause;	/* until it is time to go on */
	struct irq_work wake;
	atomic_long_t dirty;		/* pages freed since we last began */
	bool again;			/* begin anew, whatever has been freed */

	/* Where we are; only the thread itself looks at these. */
	int list;
	unsigned long scans;
	unsigned int nr_blocks;
	struct page *blocks[PREZERO_BLOCKS];

	/* What has been done. The thread writes, all read. */
	atomic64_t bytes;
	atomic64_t cpu_ns;
	atomic64_t wakeups;
};

/* Once there, they stay. */
static struct prezero_node *prezero_nodes[MAX_NUMNODES];

static struct zone *prezero_list_zone(int nid, int list)
{
	return &NODE_DATA(nid)->node_zones[MAX_NR_ZONES - 1 -
					   list / PREZERO_ZONE_LISTS];
}

static unsigned int prezero_list_order(int list)
{
	return MAX_PAGE_ORDER - list / MIGRATE_TYPES % NR_PAGE_ORDERS;
}

/*
 * The first list from @list on that we care for. Those of orders from @end_order
 * on are left to page reporting.
 */
VISIBLE_IF_KUNIT int prezero_next_list(int list, unsigned int min_order,
				       unsigned int end_order)
{
	for (; list < PREZERO_LISTS; list++) {
		const unsigned int order = prezero_list_order(list);
		const int mt = list % MIGRATE_TYPES;

		/*
		 * Who allocates from CMA has only one place to go, and does not
		 * wait for a thread that is last in every queue.
		 */
		if (order >= min_order && order < end_order &&
		    !is_migrate_isolate(mt) && !is_migrate_cma(mt) &&
		    mt != MIGRATE_HIGHATOMIC)
			break;
	}
	return list;
}

/*
 * The next block of a free list that is worth the work, or NULL. Looks at @scans
 * entries at most, and takes from @scans what it has looked at. Others are moved
 * behind, so that the search goes on from there next time; @scans is not 0 if the
 * whole list has been looked at. zone->lock is held.
 */
VISIBLE_IF_KUNIT struct page *prezero_next(struct list_head *list,
					   unsigned long *scans)
{
	struct page *found = NULL, *page;

	list_for_each_entry(page, list, buddy_list) {
		if (!*scans)
			break;

		--*scans;
		if (!page_zeroed_sources(page) && !page_reported(page)) {
			found = page;
			break;
		}
	}

	if (!list_entry_is_head(page, list, buddy_list) &&
	    !list_is_first(&page->buddy_list, list))
		list_rotate_to_front(&page->buddy_list, list);

	return found;
}

/* How long to wait for @pages to have been zeroed at no more than that rate. */
VISIBLE_IF_KUNIT unsigned long prezero_debt_ms(unsigned long pages,
					       unsigned long bytes_per_sec,
					       u64 elapsed_ns)
{
	const u64 gone = DIV_ROUND_UP_ULL(elapsed_ns, NSEC_PER_MSEC);
	u64 ms;

	if (!bytes_per_sec)
		return 0;

	/* In nanoseconds, 19 GB at a byte per second are more than 64 bits. */
	ms = mul_u64_u64_div_u64((u64)pages << PAGE_SHIFT, MSEC_PER_SEC,
				 bytes_per_sec);
	if (ms <= gone)
		return 0;

	return min_t(u64, ms - gone, UINT_MAX);
}

VISIBLE_IF_KUNIT bool prezero_any_poisoned(struct page *page,
					   unsigned int order)
{
	unsigned int i;

	for (i = 0; i < 1U << order; i++)
		if (PageHWPoison(page + i))
			return true;

	return false;
}

static void prezero_count_dirty(struct prezero_node *pn, unsigned long nr_pages)
{
	if (atomic_long_add_return(nr_pages, &pn->dirty) < PREZERO_WAKE_PAGES)
		return;

	/* That was a full barrier: whoever goes to sleep sees it, or we see him. */
	if (waitqueue_active(&pn->wait))
		irq_work_queue(&pn->wake);
}

/**
 * __prezero_notify_free - Dirty memory has been freed
 * @page: head page of a block that was added to a free list
 * @order: order of the block
 *
 * Context: Any, NMI included. zone->lock is held, so nobody can be woken here.
 */
void __prezero_notify_free(struct page *page, unsigned int order)
{
	struct prezero_node *pn = READ_ONCE(prezero_nodes[page_to_nid(page)]);

	if (pn && order >= READ_ONCE(prezero_mini_order) &&
	    !page_zeroed_sources(page))
		prezero_count_dirty(pn, 1L << order);
}

static void prezero_wake(struct irq_work *work)
{
	wake_up(&container_of(work, struct prezero_node, wake)->wait);
}

static bool prezero_has_work(struct prezero_node *pn)
{
	return READ_ONCE(pn->again) ||
	       atomic_long_read(&pn->dirty) >= PREZERO_WAKE_PAGES;
}

static void prezero_pause(struct prezero_node *pn, unsigned int ms)
{
	if (ms)
		wait_event_freezable_timeout(pn->pause,
			kthread_should_stop() || READ_ONCE(pn->again),
			msecs_to_jiffies(ms));
}

static void prezero_begin(struct prezero_node *pn)
{
	/* Pairs with the release in prezero_begin_all(). */
	xchg(&pn->again, false);
	atomic_long_set(&pn->dirty, 0);
	pn->list = 0;
	pn->scans = 0;
}

/*
 * Isolate some blocks of the list that we are at. If there are none, see to it
 * that we are at another one, or further on in this one, when called again.
 */
static void prezero_take(struct prezero_node *pn)
{
	struct zone *zone = prezero_list_zone(pn->nid, pn->list);
	const unsigned int order = prezero_list_order(pn->list);
	struct free_area *area = &zone->free_area[order];
	struct list_head *list = &area->free_list[pn->list % MIGRATE_TYPES];
	unsigned long scans, left;

	pn->nr_blocks = 0;

	if (!managed_zone(zone) ||
	    !zone_watermark_ok(zone, 0, high_wmark_pages(zone) +
			       max(PREZERO_PAGES, 1UL << order), 0, ALLOC_CMA)) {
		/* Everybody else needs this memory more than we do. */
		pn->list = roundup(pn->list + 1, PREZERO_ZONE_LISTS);
		pn->scans = 0;
		return;
	}

	if (list_empty(list)) {
		pn->list++;
		pn->scans = 0;
		return;
	}

	guard(spinlock_irq)(&zone->lock);

	/* More than is on the list, but it is not worth counting. */
	if (!pn->scans)
		pn->scans = area->nr_free;

	left = scans = min(pn->scans, PREZERO_SCANS);
	while (pn->nr_blocks < PREZERO_BLOCKS &&
	       (!pn->nr_blocks || (pn->nr_blocks + 1) << order <= PREZERO_PAGES)) {
		struct page *page = prezero_next(list, &left);

		if (!page)
			break;
		if (!isolate_untouched_block(page, order)) {
			left = 0;
			pn->scans = scans;
			break;
		}
		pn->blocks[pn->nr_blocks++] = page;
	}

	pn->scans -= scans - left;
	if (!pn->scans || (left && !pn->nr_blocks) || list_empty(list)) {
		pn->list++;
		pn->scans = 0;
	}
}

static void prezero_clear_page(struct page *page)
{
#ifdef clear_page_nontemporal
	void *kaddr = kmap_local_page(page);

	clear_page_nontemporal(kaddr);
	kunmap_local(kaddr);
#else
	page_zeroed_clear_free(page);
#endif
}

/* Zero an isolated block. Returns false if it has not become zero. */
static bool prezero_clear_block(struct page *page, unsigned int order)
{
	unsigned int i;

	if (prezero_any_poisoned(page, order))
		return false;

	for (i = 0; i < 1U << order; i++) {
		if (PageHWPoison(page + i))
			return false;
		prezero_clear_page(page + i);
		cond_resched();
	}

	/* Somebody may have found an error meanwhile. */
	return !prezero_any_poisoned(page, order);
}

/* Zero what has been isolated and put it back. Returns the number of pages. */
static unsigned long prezero_work(struct prezero_node *pn, unsigned int order)
{
	unsigned int i;

	for (i = 0; i < pn->nr_blocks; i++) {
		struct page *page = pn->blocks[i];
		long dirty;

		if (prezero_clear_block(page, order)) {
			/* Before it is put back, since that may merge it. */
			page_zeroed_claim(page, order, PAGE_ZEROED_PREZEROED);
			putback_untouched_block(page, order);
			atomic64_add(PAGE_SIZE << order, &pn->bytes);
			continue;
		}

		/*
		 * We do not want to be told of it. If somebody else frees memory
		 * at this very moment, then we are not told of that either.
		 */
		dirty = atomic_long_read(&pn->dirty);
		putback_untouched_block(page, order);
		atomic_long_sub(atomic_long_read(&pn->dirty) - dirty, &pn->dirty);
	}

	return (unsigned long)pn->nr_blocks << order;
}

/* What is done in a batch, and at what expense. */
struct prezero_run {
	struct prezero_node *pn;
	u64 cpu_before;			/* that of threads before this one */
	u64 began;
	u64 wall_last, cpu_last;	/* when it last went on */
	u64 wall, cpu;
	unsigned long done;		/* pages */
};

static void prezero_run_go_on(struct prezero_run *run)
{
	run->wall_last = ktime_get_ns();
	run->cpu_last = task_sched_runtime(current);
}

static void prezero_run_begin(struct prezero_run *run)
{
	run->wall = 0;
	run->cpu = 0;
	run->done = 0;
	prezero_run_go_on(run);
	run->began = run->wall_last;
}

/*
 * Account for @nr_pages, and make the pause that the rate asks for. Returns
 * whether it is time for another, between batches.
 */
static bool prezero_run_account(struct prezero_run *run, unsigned long nr_pages)
{
	const u64 cpu = task_sched_runtime(current);
	const u64 now = ktime_get_ns();
	unsigned int debt;
	bool over;

	run->done += nr_pages;
	run->wall += now - run->wall_last;
	run->cpu += cpu - run->cpu_last;
	run->wall_last = now;
	run->cpu_last = cpu;
	atomic64_set(&run->pn->cpu_ns, run->cpu_before + cpu);

	/* The latter: somebody else wants this CPU, or the hypervisor does. */
	over = run->done >= READ_ONCE(prezero_batch_size) >> PAGE_SHIFT ||
	       run->wall > 2 * run->cpu + 2 * NSEC_PER_MSEC;

	/* Also at the end of a batch: the next one does not know of it. */
	debt = prezero_debt_ms(run->done, READ_ONCE(prezero_max_rate),
			       now - run->began);
	if (debt) {
		prezero_pause(run->pn, debt);
		prezero_run_go_on(run);
	}

	return over;
}

#ifdef CONFIG_HUGETLB_PAGE
/**
 * __prezero_notify_pool - A dirty folio has been added to a hugetlb pool
 * @nid: its node
 * @nr_pages: its size in pages
 *
 * Context: hugetlb_lock is held.
 */
void __prezero_notify_pool(int nid, unsigned long nr_pages)
{
	struct prezero_node *pn = READ_ONCE(prezero_nodes[nid]);

	if (pn && READ_ONCE(prezero_hugetlb))
		prezero_count_dirty(pn, nr_pages);
}

/*
 * Before each few pages of a folio. There may be many batches in one, so make
 * the pauses here.
 */
static bool prezero_pool_stop(void *data)
{
	struct prezero_run *run = data;

	try_to_freeze();

	if (prezero_run_account(run, HUGETLB_ZEROING_STEP)) {
		prezero_pause(run->pn, READ_ONCE(prezero_delay_ms));
		prezero_run_begin(run);
	}

	return kthread_should_stop() || READ_ONCE(run->pn->again) ||
	       !READ_ONCE(prezero_hugetlb);
}

/* Zero the free folios of the pools. Returns whether to begin anew. */
static bool prezero_pools(struct prezero_run *run)
{
	struct hstate *h;
	long nr_pages;

	if (!READ_ONCE(prezero_hugetlb))
		return false;

	for_each_hstate(h) {
		do {
			nr_pages = hugetlb_zero_free(h, run->pn->nid,
						     prezero_pool_stop, run);
			if (nr_pages > 0)
				atomic64_add((u64)nr_pages << PAGE_SHIFT,
					     &run->pn->bytes);
		} while (nr_pages > 0 || nr_pages == -EAGAIN);

		if (nr_pages == -EINTR)
			return true;
	}

	return false;
}
#else
static bool prezero_pools(struct prezero_run *run)
{
	return false;
}
#endif /* CONFIG_HUGETLB_PAGE */

/*
 * Zero as much as a batch is. Returns whether there is more to do, or false when
 * all has been looked at.
 */
static bool prezero_batch(struct prezero_run *run)
{
	struct prezero_node *pn = run->pn;
	unsigned int order;

	if (!page_zeroed_trusted(PAGE_ZEROED_PREZEROED)) {
		pr_warn_once("memory that was zeroed did not remain zero: no more is\n");
		return false;
	}

	prezero_run_begin(run);

	do {
		try_to_freeze();
		cond_resched();
		if (kthread_should_stop())
			return true;
		if (READ_ONCE(pn->again))
			prezero_begin(pn);

		pn->list = prezero_next_list(pn->list,
					     READ_ONCE(prezero_mini_order),
					     page_reporting_from_order());
		if (pn->list >= PREZERO_LISTS)
			return prezero_pools(run);

		order = prezero_list_order(pn->list);
		prezero_take(pn);
	} while (!pn->nr_blocks ||
		 !prezero_run_account(run, prezero_work(pn, order)));

	return true;
}

static int prezero_thread(void *data)
{
	static const struct sched_param param = { .sched_priority = 0 };
	struct prezero_node *pn = data;
	struct prezero_run run = {
		.pn = pn,
		.cpu_before = atomic64_read(&pn->cpu_ns),
	};

	set_freezable();
	sched_setscheduler_nocheck(current, SCHED_IDLE, &param);

	while (!kthread_should_stop()) {
		wait_event_freezable(pn->wait, kthread_should_stop() ||
					       prezero_has_work(pn));
		if (kthread_should_stop())
			break;
		atomic64_inc(&pn->wakeups);

		/* Much of what was freed just now will soon be wanted again. */
		if (!READ_ONCE(pn->again))
			prezero_pause(pn, READ_ONCE(prezero_delay_ms));

		prezero_begin(pn);
		while (!kthread_should_stop() && prezero_batch(&run))
			prezero_pause(pn, READ_ONCE(prezero_delay_ms));

		atomic64_set(&pn->cpu_ns,
			     run.cpu_before + task_sched_runtime(current));
	}

	return 0;
}

/* What keeps us from zeroing free memory, or NULL. */
static const char *prezero_obstacle(void)
{
	const char *obstacle = page_zeroed_obstacle();

	if (obstacle)
		return obstacle;
	if (debug_pagealloc_enabled())
		return "free pages are not mapped (debug_pagealloc=on)";

	return NULL;
}

static struct kobject *prezero_kobj;
static const struct kobj_type prezero_node_ktype;

/* The node's state, made when first asked for. */
static struct prezero_node *prezero_get_node(int nid)
{
	struct prezero_node *pn = prezero_nodes[nid];
	int err;

	lockdep_assert_held(&prezero_mutex);

	if (pn)
		return pn;

	pn = kzalloc_node(sizeof(*pn), GFP_KERNEL, nid);
	if (!pn)
		return ERR_PTR(-ENOMEM);

	pn->nid = nid;
	init_waitqueue_head(&pn->wait);
	init_waitqueue_head(&pn->pause);
	/* The next tick is soon enough. */
	pn->wake = IRQ_WORK_INIT_LAZY(prezero_wake);

	err = kobject_init_and_add(&pn->kobj, &prezero_node_ktype, prezero_kobj,
				   "node%d", nid);
	if (err) {
		kobject_put(&pn->kobj);
		return ERR_PTR(err);
	}

	/* Those who free memory on this node see it from now on. */
	smp_store_release(&prezero_nodes[nid], pn);
	return pn;
}

static int prezero_start_node(int nid)
{
	struct prezero_node *pn = prezero_get_node(nid);
	struct task_struct *task;
	int err;

	if (IS_ERR(pn))
		return PTR_ERR(pn);
	if (pn->task)
		return 0;

	task = kthread_create_on_node(prezero_thread, pn, nid, "kzeropaged%d",
				      nid);
	if (IS_ERR(task))
		return PTR_ERR(task);

	/* If nothing else is said, it runs on the CPUs of its node. */
	if (!cpumask_empty(&prezero_cpus)) {
		err = kthread_affine_preferred(task, &prezero_cpus);
		if (err) {
			kthread_stop(task);
			return err;
		}
	}

	WRITE_ONCE(pn->again, true);
	pn->task = task;
	wake_up_process(task);
	return 0;
}

static void prezero_stop_node(int nid)
{
	struct prezero_node *pn = prezero_nodes[nid];

	if (!pn || !pn->task)
		return;

	/*
	 * It puts back what it has isolated before it ends. Let it do so soon,
	 * even if the CPU is never idle.
	 */
	sched_set_normal(pn->task, 0);
	kthread_stop(pn->task);
	pn->task = NULL;
}

static void prezero_stop(void)
{
	int nid;

	lockdep_assert_held(&prezero_mutex);

	static_branch_disable(&prezero_active);
	for_each_node(nid)
		prezero_stop_node(nid);
}

/* Start a thread for each node with memory: all of them, or none. */
static int prezero_start(void)
{
	const char *obstacle = prezero_obstacle();
	int nid, err;

	lockdep_assert_held(&prezero_mutex);

	if (obstacle) {
		pr_warn("free memory cannot be zeroed: %s\n", obstacle);
		return -EOPNOTSUPP;
	}

	err = page_zeroed_enable();
	if (err)
		return err;

	static_branch_enable(&prezero_active);
	for_each_node_state(nid, N_MEMORY) {
		err = prezero_start_node(nid);
		if (err) {
			pr_err("cannot start kzeropaged%d: %pe\n", nid,
			       ERR_PTR(err));
			prezero_stop();
			return err;
		}
	}

	return 0;
}

/* Make what has changed take effect now. */
static void prezero_begin_all(void)
{
	int nid;

	lockdep_assert_held(&prezero_mutex);

	for_each_node(nid) {
		struct prezero_node *pn = prezero_nodes[nid];

		if (!pn || !pn->task)
			continue;
		/* Whoever sees this sees what has changed. */
		smp_store_release(&pn->again, true);
		wake_up(&pn->wait);
		wake_up(&pn->pause);
	}
}

/*
 * There may be other nodes with memory, or more to do on those that there are.
 * Not freezable: it may stop a thread, which does not end while it is frozen.
 */
static void prezero_nodes_changed(struct work_struct *work)
{
	int nid;

	guard(mutex)(&prezero_mutex);

	for_each_node(nid) {
		int err = 0;

		if (!node_state(nid, N_MEMORY))
			prezero_stop_node(nid);
		else if (prezero_enabled)
			err = prezero_start_node(nid);
		else
			err = PTR_ERR_OR_ZERO(prezero_get_node(nid));

		if (err)
			pr_err("node %d is left out: %pe\n", nid, ERR_PTR(err));
	}

	prezero_begin_all();
}
static DECLARE_WORK(prezero_nodes_work, prezero_nodes_changed);

/*
 * Our mutex is taken before the locks of memory hotplug, so leave it to a work
 * item. A thread whose node has no memory left does no harm until then.
 */
static int prezero_memory_notify(struct notifier_block *nb, unsigned long action,
				 void *arg)
{
	if (action == MEM_ONLINE || action == MEM_OFFLINE)
		queue_work(system_dfl_wq, &prezero_nodes_work);

	return NOTIFY_OK;
}

/* After hibernation nothing is known of free memory, though none was freed. */
static int prezero_pm_notify(struct notifier_block *nb, unsigned long action,
			     void *arg)
{
	if (action == PM_POST_HIBERNATION || action == PM_POST_RESTORE)
		queue_work(system_dfl_wq, &prezero_nodes_work);

	return NOTIFY_OK;
}

/*
 * /sys/kernel/mm/zero_page
 */
#define PREZERO_ATTR_RW(_name)						\
	static struct kobj_attribute prezero_##_name##_attr =		\
		__ATTR(_name, 0644, prezero_##_name##_show, prezero_##_name##_store)
#define PREZERO_ATTR_RO(_name, _show)					\
	static struct kobj_attribute prezero_##_name##_attr =		\
		__ATTR(_name, 0444, _show, NULL)

static ssize_t prezero_enabled_show(struct kobject *kobj,
				    struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", READ_ONCE(prezero_enabled));
}

static int prezero_set_enabled(bool enable)
{
	int err = 0;

	lockdep_assert_held(&prezero_mutex);

	if (enable == prezero_enabled)
		return 0;

	if (enable)
		err = prezero_start();
	else
		prezero_stop();
	if (!err)
		WRITE_ONCE(prezero_enabled, enable);

	return err;
}

static ssize_t prezero_enabled_store(struct kobject *kobj,
				     struct kobj_attribute *attr,
				     const char *buf, size_t count)
{
	unsigned int value;
	int err;

	if (kstrtouint(buf, 10, &value) || value > 1)
		return -EINVAL;

	guard(mutex)(&prezero_mutex);
	err = prezero_set_enabled(value);

	return err ?: count;
}
PREZERO_ATTR_RW(enabled);

static ssize_t prezero_mini_order_show(struct kobject *kobj,
				       struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(prezero_mini_order));
}

static ssize_t prezero_mini_order_store(struct kobject *kobj,
					struct kobj_attribute *attr,
					const char *buf, size_t count)
{
	unsigned int value;

	if (kstrtouint(buf, 10, &value) || value > MAX_PAGE_ORDER)
		return -EINVAL;

	guard(mutex)(&prezero_mutex);
	WRITE_ONCE(prezero_mini_order, value);
	prezero_begin_all();

	return count;
}
PREZERO_ATTR_RW(mini_order);

static ssize_t prezero_delay_millisecs_show(struct kobject *kobj,
					    struct kobj_attribute *attr,
					    char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(prezero_delay_ms));
}

static ssize_t prezero_delay_millisecs_store(struct kobject *kobj,
					     struct kobj_attribute *attr,
					     const char *buf, size_t count)
{
	unsigned int value;

	if (kstrtouint(buf, 10, &value))
		return -EINVAL;

	guard(mutex)(&prezero_mutex);
	WRITE_ONCE(prezero_delay_ms, value);
	prezero_begin_all();

	return count;
}
PREZERO_ATTR_RW(delay_millisecs);

static ssize_t prezero_batch_size_show(struct kobject *kobj,
				       struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lu\n", READ_ONCE(prezero_batch_size));
}

static ssize_t prezero_batch_size_store(struct kobject *kobj,
					struct kobj_attribute *attr,
					const char *buf, size_t count)
{
	unsigned long value;

	if (kstrtoul(buf, 10, &value) || value < PAGE_SIZE)
		return -EINVAL;

	guard(mutex)(&prezero_mutex);
	WRITE_ONCE(prezero_batch_size, value);
	prezero_begin_all();

	return count;
}
PREZERO_ATTR_RW(batch_size);

static ssize_t prezero_max_rate_show(struct kobject *kobj,
				     struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lu\n", READ_ONCE(prezero_max_rate));
}

static ssize_t prezero_max_rate_store(struct kobject *kobj,
				      struct kobj_attribute *attr,
				      const char *buf, size_t count)
{
	unsigned long value;

	if (kstrtoul(buf, 10, &value))
		return -EINVAL;

	guard(mutex)(&prezero_mutex);
	WRITE_ONCE(prezero_max_rate, value);
	prezero_begin_all();

	return count;
}
PREZERO_ATTR_RW(max_rate);

#ifdef CONFIG_HUGETLB_PAGE
static ssize_t prezero_hugetlb_show(struct kobject *kobj,
				    struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", READ_ONCE(prezero_hugetlb));
}

static ssize_t prezero_hugetlb_store(struct kobject *kobj,
				     struct kobj_attribute *attr,
				     const char *buf, size_t count)
{
	unsigned int value;

	if (kstrtouint(buf, 10, &value) || value > 1)
		return -EINVAL;

	guard(mutex)(&prezero_mutex);
	WRITE_ONCE(prezero_hugetlb, value);
	prezero_begin_all();

	return count;
}
PREZERO_ATTR_RW(hugetlb);
#endif /* CONFIG_HUGETLB_PAGE */

static ssize_t prezero_cpus_show(struct kobject *kobj,
				 struct kobj_attribute *attr, char *buf)
{
	guard(mutex)(&prezero_mutex);

	return sysfs_emit(buf, "%*pbl\n", cpumask_pr_args(&prezero_cpus));
}

static ssize_t prezero_cpus_store(struct kobject *kobj,
				  struct kobj_attribute *attr,
				  const char *buf, size_t count)
{
	cpumask_var_t cpus __free(free_cpumask_var) = CPUMASK_VAR_NULL;
	int err = 0;

	if (!alloc_cpumask_var(&cpus, GFP_KERNEL))
		return -ENOMEM;
	/* An empty list stands for the CPUs of the node. */
	if (cpulist_parse(buf, cpus) || !cpumask_subset(cpus, cpu_possible_mask))
		return -EINVAL;

	guard(mutex)(&prezero_mutex);
	if (cpumask_equal(&prezero_cpus, cpus))
		return count;

	/* The affinity of a thread is chosen before it starts. */
	cpumask_copy(&prezero_cpus, cpus);
	if (prezero_enabled) {
		prezero_stop();
		err = prezero_start();
		if (err)
			WRITE_ONCE(prezero_enabled, false);
	}

	return err ?: count;
}
PREZERO_ATTR_RW(cpus);

static s64 prezero_sum(size_t offset)
{
	s64 sum = 0;
	int nid;

	for_each_node(nid) {
		/* Pairs with the release in prezero_get_node(). */
		struct prezero_node *pn = smp_load_acquire(&prezero_nodes[nid]);

		if (pn)
			sum += atomic64_read((void *)pn + offset);
	}
	return sum;
}

static ssize_t prezero_bytes_show(struct kobject *kobj,
				  struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lld\n",
			  prezero_sum(offsetof(struct prezero_node, bytes)));
}
PREZERO_ATTR_RO(bytes_zeroed, prezero_bytes_show);

static ssize_t prezero_cpu_show(struct kobject *kobj,
				struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lld\n", div_s64(
			  prezero_sum(offsetof(struct prezero_node, cpu_ns)),
			  NSEC_PER_MSEC));
}
PREZERO_ATTR_RO(cpu_millisecs, prezero_cpu_show);

static struct attribute *prezero_attrs[] = {
	&prezero_enabled_attr.attr,
	&prezero_mini_order_attr.attr,
	&prezero_delay_millisecs_attr.attr,
	&prezero_batch_size_attr.attr,
	&prezero_max_rate_attr.attr,
#ifdef CONFIG_HUGETLB_PAGE
	&prezero_hugetlb_attr.attr,
#endif
	&prezero_cpus_attr.attr,
	&prezero_bytes_zeroed_attr.attr,
	&prezero_cpu_millisecs_attr.attr,
	NULL
};
ATTRIBUTE_GROUPS(prezero);

static struct prezero_node *to_prezero_node(struct kobject *kobj)
{
	return container_of(kobj, struct prezero_node, kobj);
}

static ssize_t prezero_node_bytes_show(struct kobject *kobj,
				       struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lld\n",
			  atomic64_read(&to_prezero_node(kobj)->bytes));
}

static ssize_t prezero_node_cpu_show(struct kobject *kobj,
				     struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lld\n",
			  div_s64(atomic64_read(&to_prezero_node(kobj)->cpu_ns),
				  NSEC_PER_MSEC));
}

static ssize_t prezero_node_wakeups_show(struct kobject *kobj,
					 struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lld\n",
			  atomic64_read(&to_prezero_node(kobj)->wakeups));
}

static ssize_t prezero_node_free_show(struct kobject *kobj,
				      struct kobj_attribute *attr, char *buf)
{
	u64 pages = sum_zone_node_page_state(to_prezero_node(kobj)->nid,
					     NR_FREE_ZEROED);

	return sysfs_emit(buf, "%llu\n", pages << PAGE_SHIFT);
}

static struct kobj_attribute prezero_node_bytes_attr =
	__ATTR(bytes_zeroed, 0444, prezero_node_bytes_show, NULL);
static struct kobj_attribute prezero_node_cpu_attr =
	__ATTR(cpu_millisecs, 0444, prezero_node_cpu_show, NULL);
static struct kobj_attribute prezero_node_wakeups_attr =
	__ATTR(wakeups, 0444, prezero_node_wakeups_show, NULL);
static struct kobj_attribute prezero_node_free_attr =
	__ATTR(free_zeroed_bytes, 0444, prezero_node_free_show, NULL);

static struct attribute *prezero_node_attrs[] = {
	&prezero_node_bytes_attr.attr,
	&prezero_node_cpu_attr.attr,
	&prezero_node_wakeups_attr.attr,
	&prezero_node_free_attr.attr,
	NULL
};
ATTRIBUTE_GROUPS(prezero_node);

static void prezero_node_release(struct kobject *kobj)
{
	kfree(to_prezero_node(kobj));
}

static const struct kobj_type prezero_node_ktype = {
	.sysfs_ops = &kobj_sysfs_ops,
	.release = prezero_node_release,
	.default_groups = prezero_node_groups,
};

static bool prezero_at_boot __initdata;

static int __init prezero_setup(char *str)
{
	if (kstrtobool(str, &prezero_at_boot))
		pr_warn("prezero=%s is neither on nor off\n", str);

	return 1;
}
__setup("prezero=", prezero_setup);

static int __init prezero_init(void)
{
	int err;

	prezero_kobj = kobject_create_and_add("zero_page", mm_kobj);
	if (!prezero_kobj)
		return -ENOMEM;

	hotplug_memory_notifier(prezero_memory_notify, DEFAULT_CALLBACK_PRI);
	pm_notifier(prezero_pm_notify, 0);
	prezero_nodes_changed(NULL);

	scoped_guard(mutex, &prezero_mutex)
		err = prezero_set_enabled(prezero_at_boot);
	if (err)
		pr_warn("prezero=on has no effect\n");

	/* Last, so that nobody writes to it before. */
	err = sysfs_create_groups(prezero_kobj, prezero_groups);
	if (err)
		pr_err("cannot create /sys/kernel/mm/zero_page: %pe\n",
		       ERR_PTR(err));

	return err;
}
late_initcall(prezero_init);
