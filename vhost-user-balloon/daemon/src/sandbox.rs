// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the process gives up before it looks at anything a guest or a front end sends.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::Path;

use balloon_discard::SYS_CACHESTAT;
use clap::ValueEnum;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope, path_beneath_rules,
};
use libc::{c_int, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use thiserror::Error;

use crate::foreign::open_proc;

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
}

/// What is found out once and kept, and cannot be found out later: before Linux 6.4 it is in a file of
/// /proc, and with newer ones it takes a call that is not allowed.
fn remember() {
    let _ = rustix::param::page_size();
}

/// Give up all files, network and signals to others, as far as this kernel can. `removable`: folders from
/// which, and from all below them, files may be removed.
pub fn landlock<'a>(removable: impl Iterator<Item = &'a Path>) -> Result<&'static str, SandboxError> {
    remember();
    let newest = ABI::V6;
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(newest))?
        .handle_access(AccessNet::from_all(newest))?
        .scope(Scope::from_all(newest))?
        .create()?
        .add_rules(path_beneath_rules(removable, AccessFs::RemoveFile))?;
    Ok(match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => "landlock",
        RulesetStatus::PartiallyEnforced => "landlock (in part: older kernel)",
        RulesetStatus::NotEnforced => "no landlock (not in this kernel)",
    })
}

/// Allow the system calls that are needed from now on, on all threads.
pub fn seccomp(action: Seccomp) -> Result<&'static str, SandboxError> {
    let (otherwise, name) = match action {
        Seccomp::Off => return Ok("no seccomp (switched off)"),
        Seccomp::Kill => (SeccompAction::KillProcess, "seccomp"),
        Seccomp::Log => (SeccompAction::Log, "seccomp (logs only)"),
    };
    let refused = |error: &dyn std::fmt::Display| SandboxError::Seccomp(error.to_string());
    remember();
    let proc = open_proc().map_err(|e| refused(&e))?;
    let machine = std::env::consts::ARCH.try_into().map_err(|e| refused(&e))?;
    let filter =
        SeccompFilter::new(rules(proc).map_err(|e| refused(&e))?, otherwise, SeccompAction::Allow, machine)
            .map_err(|e| refused(&e))?;
    let program: BpfProgram = filter.try_into().map_err(|e| refused(&e))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|e| refused(&e))?;
    Ok(name)
}

fn rules(proc: RawFd) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALWAYS.iter().chain(OLD).chain(&[SYS_CACHESTAT]).map(|call| (*call, Vec::new())).collect();
    for (call, argument, values) in LIMITED {
        let one = |value: &c_int| {
            let value = u64::from(value.cast_unsigned());
            let equal = SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?;
            SeccompRule::new(vec![equal])
        };
        rules.insert(*call, values.iter().map(one).collect::<Result<_, _>>()?);
    }
    // What a descriptor is, and nothing about other files.
    let folder = u64::from(proc.cast_unsigned());
    let equal = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, folder)?;
    rules.insert(libc::SYS_readlinkat, vec![SeccompRule::new(vec![equal])?]);
    Ok(rules)
}

/// Calls of which one argument has one of these values.
const LIMITED: &[(c_long, u8, &[c_int])] = &[
    // Holes, and nothing else: neither writing zeros nor collapsing nor growing a file.
    (libc::SYS_fallocate, 1, &[libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE]),
    // Memory that can be executed is never mapped.
    (libc::SYS_mmap, 2, DATA),
    (libc::SYS_mprotect, 2, DATA),
    (
        libc::SYS_fcntl,
        1,
        &[
            libc::F_GETFL,
            libc::F_SETFL,
            libc::F_GETFD,
            libc::F_SETFD,
            libc::F_DUPFD_CLOEXEC,
            libc::F_GET_SEALS,
        ],
    ),
    // How the standard library makes a socket not wait.
    (libc::SYS_ioctl, 1, &[FIONBIO]),
];
const DATA: &[c_int] = &[libc::PROT_NONE, libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE];
#[allow(clippy::cast_possible_truncation)]
const FIONBIO: c_int = libc::FIONBIO as c_int;

macro_rules! calls {
    ($($call:ident)*) => { &[$(libc::$call),*] };
}

#[rustfmt::skip]
const ALWAYS: &[c_long] = calls! {
    // sockets that exist, pipes and events
    SYS_read SYS_write SYS_writev SYS_recvmsg SYS_recvfrom SYS_sendmsg SYS_sendto SYS_accept4 SYS_getpeername
    SYS_getsockopt SYS_setsockopt SYS_shutdown SYS_close SYS_ppoll
    // what a descriptor is
    SYS_fstat SYS_newfstatat SYS_statx SYS_fstatfs SYS_pread64 SYS_pwrite64 SYS_inotify_add_watch
    // memory
    SYS_munmap SYS_mremap SYS_madvise SYS_brk
    // threads and time
    SYS_futex SYS_sched_yield SYS_clock_gettime SYS_setitimer SYS_restart_syscall SYS_getpid SYS_gettid
    SYS_getrandom
    // the end
    SYS_rt_sigprocmask SYS_rt_sigaction SYS_rt_sigreturn SYS_rt_sigtimedwait SYS_sigaltstack SYS_tgkill
    SYS_exit SYS_exit_group
};

/// The same by their old names.
#[cfg(target_arch = "x86_64")]
const OLD: &[c_long] = calls! { SYS_poll };
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[c_long] = &[];
