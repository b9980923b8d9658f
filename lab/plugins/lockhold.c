// SPDX-License-Identifier: GPL-2.0
/*
 * lockhold: a QEMU TCG plugin that measures how long a guest's Linux kernel holds the spinlocks of its
 * zones (zone->lock), in instructions. For x86-64, one CPU, and a kernel at its usual place (nokaslr).
 *
 * Spinlocks are taken and released out of line there, so all it needs to know is where:
 *
 *   lock START END     functions that take one, whose address is in RDI (hexadecimal, END behind it)
 *   unlock START END   functions that release one
 *   learn START END    functions that take zone->lock and no other: what they take is one
 *
 * A hold is the instructions after the one that takes the lock, up to and including the one that
 * releases it. Who took it is the address that the lock function returns to.
 *
 * What has been seen since the guest began stands in a file, which may be read at any time; see the
 * struct. Nothing in it is ever taken back, so what a job adds is the difference.
 *
 * Arguments: symbols=FILE,out=FILE
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <glib.h>
#include <qemu-plugin.h>

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

#define RANGES 256
#define LOCKS 32
#define BITS 18
#define SLOTS (1u << BITS)

struct range {
	uint64_t start, end;
};

struct ranges {
	struct range of[RANGES];
	unsigned int nr;
};

/* The file: 64-bit words of the machine. */
struct shown {
	char magic[8];
	uint64_t slots;
	uint64_t lost;		/* holds that there was no room for */
	uint64_t wrong;		/* a lock that was held was taken, or one that was free was released */
	uint64_t taken, released;
	uint64_t nr_locks;
	uint64_t locks[LOCKS];
	struct {
		uint64_t site, length, count;	/* how often this caller held one for so long */
	} holds[SLOTS];
};

static struct ranges takes, releases, learns;
static struct shown *shown;
static qemu_plugin_u64 instructions;
static struct qemu_plugin_register *rdi, *rsp;
static GByteArray *bytes;

/* Of each lock in shown->locks. */
static struct {
	uint64_t caller;	/* who is about to take it */
	uint64_t site, since;
	bool held;
} states[LOCKS];

static bool within(const struct ranges *ranges, uint64_t address)
{
	unsigned int i;

	for (i = 0; i < ranges->nr; i++)
		if (address >= ranges->of[i].start && address < ranges->of[i].end)
			return true;
	return false;
}

static bool begins(const struct ranges *ranges, uint64_t address)
{
	unsigned int i;

	for (i = 0; i < ranges->nr; i++)
		if (address == ranges->of[i].start)
			return true;
	return false;
}

/* The index of a lock, or LOCKS if it is not one of a zone. */
static unsigned int known(uint64_t lock)
{
	unsigned int i;

	for (i = 0; i < shown->nr_locks; i++)
		if (shown->locks[i] == lock)
			return i;
	return LOCKS;
}

static uint64_t number(void)
{
	uint64_t value = 0;

	if (bytes->len >= sizeof(value))
		memcpy(&value, bytes->data, sizeof(value));
	return value;
}

static uint64_t value_of(struct qemu_plugin_register *reg)
{
	g_byte_array_set_size(bytes, 0);
	return qemu_plugin_read_register(reg, bytes) < 0 ? 0 : number();
}

static void note(uint64_t site, uint64_t length)
{
	unsigned int slot = (unsigned int)(((site * 31 + length) * 0x9e3779b97f4a7c15ull) >> (64 - BITS));
	unsigned int tries;

	for (tries = 0; tries < SLOTS; tries++, slot = (slot + 1) % SLOTS) {
		if (!shown->holds[slot].count) {
			shown->holds[slot].site = site;
			shown->holds[slot].length = length;
		}
		if (shown->holds[slot].site == site && shown->holds[slot].length == length) {
			shown->holds[slot].count++;
			return;
		}
	}
	shown->lost++;
}

/* Before a call that takes zone->lock. */
static void learn(unsigned int cpu, void *unused)
{
	const uint64_t lock = value_of(rdi);

	(void)cpu;
	(void)unused;
	if (known(lock) < LOCKS)
		return;
	if (shown->nr_locks == LOCKS)
		shown->lost++;
	else
		shown->locks[shown->nr_locks++] = lock;
}

/* At the first instruction of a function that takes a lock: the return address is on top of the stack. */
static void entered(unsigned int cpu, void *unused)
{
	const unsigned int i = known(value_of(rdi));
	uint64_t top;

	(void)cpu;
	(void)unused;
	if (i == LOCKS)
		return;
	top = value_of(rsp);
	g_byte_array_set_size(bytes, 0);
	states[i].caller = qemu_plugin_read_memory_vaddr(top, bytes, sizeof(uint64_t)) ? number() : 0;
}

/* Blocks are counted when they begin; @after is how many of this one come after the instruction. */
static uint64_t now(unsigned int cpu, const void *after)
{
	return qemu_plugin_u64_get(instructions, cpu) - (uintptr_t)after;
}

static void taken(unsigned int cpu, qemu_plugin_meminfo_t info, uint64_t address, void *after)
{
	const unsigned int i = known(address);

	if (i == LOCKS || !qemu_plugin_mem_is_store(info))
		return;
	shown->taken++;
	shown->wrong += states[i].held;
	states[i].held = true;
	states[i].site = states[i].caller;
	states[i].since = now(cpu, after);
}

static void released(unsigned int cpu, qemu_plugin_meminfo_t info, uint64_t address, void *after)
{
	const unsigned int i = known(address);

	if (i == LOCKS || !qemu_plugin_mem_is_store(info))
		return;
	shown->released++;
	if (states[i].held)
		note(states[i].site, now(cpu, after) - states[i].since);
	else
		shown->wrong++;
	states[i].held = false;
}

/* Does a direct call go to a function that takes a lock? */
static bool calls_lock(const struct qemu_plugin_insn *insn)
{
	unsigned char code[5];
	int32_t distance;

	if (qemu_plugin_insn_data(insn, code, sizeof(code)) != sizeof(code) || code[0] != 0xe8)
		return false;
	memcpy(&distance, code + 1, sizeof(distance));
	return begins(&takes, qemu_plugin_insn_vaddr(insn) + sizeof(code) + (int64_t)distance);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	const size_t n = qemu_plugin_tb_n_insns(tb);
	size_t i;

	(void)id;
	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64, instructions, n);
	/* Kernel addresses are the upper half. */
	if (!(qemu_plugin_tb_vaddr(tb) >> 63))
		return;
	for (i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		const uint64_t address = qemu_plugin_insn_vaddr(insn);
		void *after = (void *)(uintptr_t)(n - 1 - i);

		if (begins(&takes, address))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, entered, QEMU_PLUGIN_CB_R_REGS, NULL);
		if (within(&takes, address))
			qemu_plugin_register_vcpu_mem_cb(insn, taken, QEMU_PLUGIN_CB_NO_REGS,
							 QEMU_PLUGIN_MEM_W, after);
		else if (within(&releases, address))
			qemu_plugin_register_vcpu_mem_cb(insn, released, QEMU_PLUGIN_CB_NO_REGS,
							 QEMU_PLUGIN_MEM_W, after);
		else if (within(&learns, address) && calls_lock(insn))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, learn, QEMU_PLUGIN_CB_R_REGS, NULL);
	}
}

static void cpu_began(qemu_plugin_id_t id, unsigned int cpu)
{
	GArray *registers = qemu_plugin_get_registers();
	unsigned int i;

	(void)id;
	(void)cpu;
	for (i = 0; i < registers->len; i++) {
		const qemu_plugin_reg_descriptor *reg =
			&g_array_index(registers, qemu_plugin_reg_descriptor, i);

		if (!strcmp(reg->name, "rdi"))
			rdi = reg->handle;
		if (!strcmp(reg->name, "rsp"))
			rsp = reg->handle;
	}
	g_array_free(registers, TRUE);
	if (!rdi || !rsp) {
		fprintf(stderr, "lockhold: this CPU has no RDI and RSP; it takes an x86-64 guest\n");
		exit(1);
	}
}

/* 0, or -1 when that is no file of ranges. */
static int read_symbols(const char *path)
{
	FILE *file = fopen(path, "r");
	struct range range;
	char kind[8];
	int got;

	if (!file) {
		perror("lockhold: symbols=");
		return -1;
	}
	while ((got = fscanf(file, "%7s %" SCNx64 " %" SCNx64, kind, &range.start, &range.end)) == 3) {
		struct ranges *to = !strcmp(kind, "lock") ? &takes :
				    !strcmp(kind, "unlock") ? &releases :
				    !strcmp(kind, "learn") ? &learns : NULL;

		if (!to || to->nr == RANGES)
			break;
		to->of[to->nr++] = range;
	}
	fclose(file);
	if (got == EOF && takes.nr && releases.nr && learns.nr)
		return 0;
	fprintf(stderr, "lockhold: symbols= takes lines `lock START END`, `unlock …` and `learn …`\n");
	return -1;
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	int fd;

	if (argc != 2 || strncmp(argv[0], "symbols=", 8) || strncmp(argv[1], "out=", 4)) {
		fprintf(stderr, "lockhold: give symbols=FILE,out=FILE and nothing else\n");
		return -1;
	}
	if (strcmp(info->target_name, "x86_64") || info->system.max_vcpus != 1) {
		fprintf(stderr, "lockhold: it takes an x86-64 guest with one CPU\n");
		return -1;
	}
	if (read_symbols(argv[0] + 8))
		return -1;
	fd = open(argv[1] + 4, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, sizeof(*shown))) {
		perror("lockhold: out=");
		return -1;
	}
	shown = mmap(NULL, sizeof(*shown), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (shown == MAP_FAILED) {
		perror("lockhold: mmap");
		return -1;
	}
	memcpy(shown->magic, "KZLOCKS1", sizeof(shown->magic));
	shown->slots = SLOTS;
	bytes = g_byte_array_new();
	instructions = qemu_plugin_scoreboard_u64(qemu_plugin_scoreboard_new(sizeof(uint64_t)));
	qemu_plugin_register_vcpu_init_cb(id, cpu_began);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
