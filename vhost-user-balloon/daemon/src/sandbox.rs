// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the process gives up before it looks at anything a guest or a front end sends.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use balloon_discard::SYS_CACHESTAT;
use clap::ValueEnum;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use libc::{c_int, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use thiserror::Error;

/// The action on an unexpected system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Seccomp {
    /// The process ends
    Kill,
    /// The kernel logs it
    Log,
    /// Nothing
    Off,
}

#[derive(Debug, Error)]
pub enum SandboxError {
    #[error("cannot confine the process by landlock: {0}; --landlock off goes on without it")]
    Landlock(#[from] landlock::RulesetError),
    #[error("cannot confine the process by seccomp: {0}; --seccomp off goes on without it")]
    Seccomp(String),
    #[error("cannot start a thread: {0}; allow this user twelve threads (ulimit -u)")]
    Thread(io::Error),
}

/// What is found out once and kept, and cannot be found out later: before Linux 6.4 it is in a file of
/// /proc, and with newer ones it takes a call that is not allowed.
fn remember() {
    let _ = rustix::param::page_size();
}

/// Give up all files, network and signals to others, as far as this kernel can.
pub fn landlock() -> Result<&'static str, SandboxError> {
    remember();
    let newest = ABI::V6;
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(newest))?
        .handle_access(AccessNet::from_all(newest))?
        .scope(Scope::from_all(newest))?
        .create()?;
    Ok(match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => "landlock",
        RulesetStatus::PartiallyEnforced => "landlock (in part: older kernel)",
        RulesetStatus::NotEnforced => "no landlock (not in this kernel)",
    })
}

/// The system calls of a thread, and of some of them the values that one argument may have. A thread touches what its
/// calls and descriptors allow: README has the table.
pub struct Row {
    calls: &'static [c_long],
    limited: Vec<(c_long, u8, Limit)>,
}

enum Limit {
    Only(&'static [c_int]),
    /// One descriptor.
    Fd(RawFd),
    /// Neither standard output nor error, which a peer may have as well.
    NotStandard,
}

impl Row {
    /// The thread that serves: it closes nothing, and writes to neither standard output nor error. `proc`: the folder that
    /// has what each descriptor is; `state`: the file of `--state`.
    pub fn serves(proc: RawFd, state: Option<RawFd>) -> Self {
        let mut limited = vec![
            (libc::SYS_write, 0, Limit::NotStandard),
            // Holes, and nothing else: neither writing zeros nor collapsing nor growing a file.
            (libc::SYS_fallocate, 1, Limit::Only(&[libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE])),
            (libc::SYS_fcntl, 1, Limit::Only(&[libc::F_GETFL, libc::F_SETFL, libc::F_GET_SEALS])),
            // How the standard library makes a socket not wait.
            (libc::SYS_ioctl, 1, Limit::Only(&[FIONBIO])),
            // What a descriptor is, and nothing about other files.
            (libc::SYS_readlinkat, 0, Limit::Fd(proc)),
        ];
        if let Some(file) = state {
            limited.extend([libc::SYS_pwrite64, libc::SYS_ftruncate].map(|call| (call, 0, Limit::Fd(file))));
        }
        Self { calls: SERVES, limited }
    }

    /// One that closes descriptors, and says so by an event.
    pub fn closes(drained: BorrowedFd<'_>) -> Self {
        let limited = vec![
            (libc::SYS_write, 0, Limit::Fd(drained.as_raw_fd())),
            // A build with assertions asks whether it is open.
            (libc::SYS_fcntl, 1, Limit::Only(&[libc::F_GETFD])),
        ];
        Self { calls: &[libc::SYS_close], limited }
    }

    /// The one that writes the log.
    pub fn log() -> Self {
        Self { calls: &[], limited: vec![(libc::SYS_write, 0, Limit::Fd(libc::STDERR_FILENO))] }
    }

    /// The one that calls User-Mode Linux.
    pub fn calls() -> Self {
        Self { calls: &[libc::SYS_sendto], limited: Vec::new() }
    }

    /// The one that waits for the end.
    pub fn signals() -> Self {
        Self { calls: &[libc::SYS_rt_sigtimedwait], limited: Vec::new() }
    }

    fn rules(self) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
        let calls = ALWAYS.iter().chain(self.calls);
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls.map(|call| (*call, Vec::new())).collect();
        // Memory that can be executed is never mapped.
        let data = [libc::SYS_mmap, libc::SYS_mprotect].map(|call| (call, 2, Limit::Only(DATA)));
        for (call, argument, limit) in self.limited.into_iter().chain(data) {
            let condition = |op, value: c_int| {
                let value = u64::from(value.cast_unsigned());
                SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)
            };
            let is = |value| SeccompRule::new(vec![condition(SeccompCmpOp::Eq, value)?]);
            let allowed = match limit {
                Limit::Only(values) => values.iter().copied().map(is).collect::<Result<_, _>>()?,
                Limit::Fd(fd) => vec![is(fd)?],
                Limit::NotStandard => {
                    let other = |fd| condition(SeccompCmpOp::Ne, fd);
                    vec![SeccompRule::new(vec![other(libc::STDOUT_FILENO)?, other(libc::STDERR_FILENO)?])?]
                }
            };
            rules.insert(call, allowed);
        }
        Ok(rules)
    }
}

/// Allow this thread the system calls of its row from now on.
pub fn seccomp(action: Seccomp, row: Row) -> Result<&'static str, SandboxError> {
    let (otherwise, name) = match action {
        Seccomp::Off => return Ok("no seccomp (switched off)"),
        Seccomp::Kill => (SeccompAction::KillProcess, "seccomp"),
        Seccomp::Log => (SeccompAction::Log, "seccomp (logs only)"),
    };
    let refused = |error: &dyn std::fmt::Display| SandboxError::Seccomp(error.to_string());
    remember();
    let machine = std::env::consts::ARCH.try_into().map_err(|e| refused(&e))?;
    let rules = row.rules().map_err(|e| refused(&e))?;
    let filter =
        SeccompFilter::new(rules, otherwise, SeccompAction::Allow, machine).map_err(|e| refused(&e))?;
    let program: BpfProgram = filter.try_into().map_err(|e| refused(&e))?;
    seccompiler::apply_filter(&program).map_err(|e| refused(&e))?;
    Ok(name)
}

const DATA: &[c_int] = &[libc::PROT_NONE, libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE];
#[allow(clippy::cast_possible_truncation)]
const FIONBIO: c_int = libc::FIONBIO as c_int;

macro_rules! calls {
    ($($call:ident)*) => { &[$(libc::$call),*] };
}

/// Of each thread: own memory, locks of this process, time, and the end.
#[rustfmt::skip]
const ALWAYS: &[c_long] = calls! {
    SYS_munmap SYS_mremap SYS_madvise SYS_brk
    SYS_futex SYS_sched_yield SYS_clock_gettime SYS_restart_syscall SYS_getpid SYS_gettid SYS_getrandom
    SYS_rt_sigprocmask SYS_rt_sigaction SYS_rt_sigreturn SYS_sigaltstack SYS_tgkill SYS_exit SYS_exit_group
};

#[rustfmt::skip]
const SERVES: &[c_long] = &[
    // its sockets, and events
    libc::SYS_read, libc::SYS_recvmsg, libc::SYS_recvfrom, libc::SYS_sendmsg, libc::SYS_sendto, libc::SYS_accept4,
    libc::SYS_getpeername, libc::SYS_getsockopt, libc::SYS_setsockopt, libc::SYS_shutdown, libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    // files of guest memory
    libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_fstatfs, libc::SYS_pread64, SYS_CACHESTAT,
    libc::SYS_inotify_add_watch,
    libc::SYS_setitimer,
];
