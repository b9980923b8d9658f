// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program: its options, sandbox and exit status.

use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;

use crate::cli::{Cli, Command, Daemon, LogFormat, Switch, capabilities};
use crate::foreign::open_proc;
use crate::sandbox::Row;
use crate::server::{Server, ServerError, Source};
use crate::state::{StateError, StateFile};
use crate::{log, notify, run, sandbox, service, signals, subcommand, threads};
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing_subscriber::filter::LevelFilter;

#[derive(Debug, thiserror::Error)]
enum MainError {
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error(transparent)]
    Sandbox(#[from] sandbox::SandboxError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("cannot have {needed} descriptors at once: this process may have {most}; allow them (ulimit -n)", needed = threads::DESCRIPTORS)]
    Descriptors { most: u64 },
    #[error("cannot wait for signals: {0}; start the device again")]
    Signals(io::Error),
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const MEMORY_LOST: u8 = signals::MEMORY_LOST as u8;

pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match &cli.command {
        Some(Command::Run { vmm, .. }) => {
            // The options were parsed to see that they are valid; the device parses them again.
            let own = std::env::args_os().skip(2).take_while(|argument| argument != "--");
            return fail(&run::run(&own.collect::<Vec<_>>(), vmm));
        }
        Some(command) => {
            return match subcommand::run(command) {
                Ok(text) => print(&text),
                Err(error) => {
                    fail(&error);
                    error.exit_code()
                }
            };
        }
        None if cli.daemon.print_capabilities => return print(&capabilities()),
        None => {}
    }
    if let Some(path) = cli.daemon.socket_path.as_ref().filter(|_| cli.daemon.print_qemu_args) {
        return print(&run::qemu_args(path));
    }
    if cli.daemon.socket_path.is_none() && cli.daemon.fd.is_none() {
        let _ = writeln!(
            io::stderr(),
            "vhost-user-balloon: cannot be a device: no front end is given; use --socket-path or --fd"
        );
        return ExitCode::from(2);
    }
    set_up_log(&cli.daemon);
    let code = match serve(&cli.daemon) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            service::remove_sockets();
            tracing::error!("{error}");
            match error {
                MainError::Server(ServerError::MemoryLost(_)) => ExitCode::from(MEMORY_LOST),
                _ => ExitCode::FAILURE,
            }
        }
    };
    log::finish();
    code
}

fn print(text: &str) -> ExitCode {
    match writeln!(io::stdout(), "{text}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn fail(error: &dyn std::fmt::Display) -> ExitCode {
    let _ = writeln!(io::stderr(), "vhost-user-balloon: {error}");
    ExitCode::FAILURE
}

fn set_up_log(daemon: &Daemon) {
    let lines = tracing_subscriber::fmt()
        .with_max_level(daemon.log_level.parse().unwrap_or(LevelFilter::INFO))
        .with_writer(|| log::Lines)
        .with_target(false)
        // It would report a closed standard error on standard error, and panic.
        .log_internal_errors(false);
    match daemon.log_format {
        // The journal has the time.
        LogFormat::Text => lines.without_time().with_ansi(false).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}

/// Have room for all descriptors that can come: the kernel closes those for which there is none, here and now.
fn allow_descriptors() -> Result<(), MainError> {
    let limit = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= threads::DESCRIPTORS);
    if enough(limit.current) {
        return Ok(());
    }
    let most = limit.maximum.unwrap_or(0);
    let raised = Rlimit { current: Some(threads::DESCRIPTORS), ..limit };
    match enough(limit.maximum) && setrlimit(Resource::Nofile, raised).is_ok() {
        true => Ok(()),
        false => Err(MainError::Descriptors { most }),
    }
}

fn serve(daemon: &Daemon) -> Result<(), MainError> {
    let passed = daemon.fd.map(inherited).transpose()?;
    allow_descriptors()?;
    let ending = signals::block(&[libc::SIGTERM, libc::SIGINT]).map_err(MainError::Signals)?;
    signals::install().map_err(MainError::Signals)?;

    // This thread closes nothing once it is confined: the end of the process does.
    let mut server = ManuallyDrop::new(Server::new(daemon.options())?);
    let source = match (&daemon.socket_path, passed) {
        (Some(path), _) => Source::listen(path)?,
        (None, Some(source)) => source,
        // main() has asked for one of them.
        (None, None) => return Ok(()),
    };
    if let Some(path) = &daemon.control {
        server.control(path)?;
    }
    if let Some(path) = &daemon.metrics_socket {
        server.metrics(path)?;
    }
    let mut state = None;
    if let Some(path) = &daemon.state {
        let (file, kept) = StateFile::open(path)?;
        state = Some(file.descriptor());
        server.keep_state(file, kept);
    }
    // In the sandbox there is no way to reach it.
    let manager = notify::connect();

    let landlock = match daemon.landlock {
        Switch::Off => "no landlock (switched off)",
        Switch::On => sandbox::landlock()?,
    };
    end_on_signal(ending, daemon.seccomp)?;
    threads::start_closers(daemon.seccomp)?;
    if daemon.user_mode_linux {
        threads::start_caller(daemon.seccomp)?;
    }
    log::start(daemon.seccomp)?;
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!("{panic}");
        log::finish();
    }));
    let row = Row::serves(open_proc().map_err(ServerError::Proc)?, state);
    service::keep_sockets();
    let seccomp = sandbox::seccomp(daemon.seccomp, row)?;
    let how = format!("{seccomp}, {landlock}");
    tracing::info!(sandbox = how, "ready");
    server.set_sandbox(how);
    // A supervisor may connect its VMM now.
    if let Err(error) = manager.and_then(notify::ready) {
        tracing::warn!(%error, "the service manager does not know that it is ready");
    }
    Ok(server.run(source)?)
}

/// From now on SIGTERM and SIGINT end the process at once and cleanly, whatever it is doing.
///
/// A thread of its own waits for them: the serving thread can wait for a lock of guest memory.
/// Landlock confines a thread and those that it starts later, so this comes after it, and before the
/// seccomp filter of this thread, which has no room for new threads.
fn end_on_signal(signals: signals::Blocked, seccomp: sandbox::Seccomp) -> Result<(), sandbox::SandboxError> {
    threads::start("signals", seccomp, Row::signals(), move || {
        if signals.wait() {
            // SAFETY: ends the process. There is no state to be saved, and destructors that run while
            // the other thread still works would be worse than none.
            unsafe { libc::_exit(0) };
        }
    })
}

/// The socket that the parent has passed. Call it before anything opens a descriptor.
fn inherited(fd: RawFd) -> Result<Source, ServerError> {
    let failed = |why: io::Error| ServerError::Descriptor { fd, why };
    if fd <= 2 {
        return Err(failed(io::Error::other("it is standard input, output or error, or no number of one")));
    }
    // SAFETY: serve() calls this before it opens a descriptor, and the standard ones were just
    // excluded. So the number is that of a descriptor which the parent passed and which nothing
    // else in this process has, or of none; then the next call fails.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let listens = match rustix::net::sockopt::socket_acceptconn(&owned) {
        Ok(listens) => listens,
        Err(error) => {
            // Closing a number that is no descriptor would end the program.
            std::mem::forget(owned);
            return Err(failed(error.into()));
        }
    };
    rustix::io::fcntl_setfd(&owned, rustix::io::FdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    Ok(if listens {
        Source::Listener(UnixListener::from(owned))
    } else {
        Source::Stream(UnixStream::from(owned))
    })
}
