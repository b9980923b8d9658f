// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program: its sandbox, its sockets, and how it ends.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::*;

/// What is offered without options.
const DEFAULT: u64 = ALL & !(1 << 7);
const PROGRAM: &str = env!("CARGO_BIN_EXE_vhost-user-balloon");

struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start(arguments: &[&str]) -> Self {
        Self::start_as(arguments, |_| Command::new(PROGRAM))
    }

    /// Started by a command that gets the folder in which it will run.
    fn start_as(arguments: &[&str], command: impl FnOnce(&Path) -> Command) -> Self {
        Self::start_with(arguments, command, None)
    }

    /// Started with something else than a file for standard error.
    fn start_with(arguments: &[&str], command: impl FnOnce(&Path) -> Command, errors: Option<Stdio>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = command(folder.path())
            .args(["--socket-path", "front", "--control", "control", "--device-init-on-inflate", "on"])
            .args(arguments)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors.unwrap_or_else(|| log.into()))
            .spawn()
            .unwrap();
        let daemon = Self { child, folder };
        // The last thing that it makes before it is confined; what is sent from then on is answered.
        assert!(eventually(|| UnixStream::connect(daemon.path("control")).is_ok()), "{}", daemon.log());
        daemon
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    fn vm(&self) -> Vm {
        let socket = UnixStream::connect(self.path("front")).unwrap();
        Vm::with(socket, self.path("control"), tempfile::tempdir().unwrap(), None)
    }

    fn say(&self, arguments: &[&str]) -> Output {
        let mut all = arguments.to_vec();
        all.insert(1, "--control");
        all.insert(2, "control");
        Command::new(PROGRAM).args(&all).current_dir(self.folder.path()).output().unwrap()
    }

    /// A line of /proc/PID/status, in its own unit (kB, or none).
    fn about(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a line of that name");
        line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    fn signal(&self, signal: i32) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let signal = if signal == 15 { rustix::process::Signal::TERM } else { rustix::process::Signal::INT };
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn end(&mut self) -> std::process::ExitStatus {
        let began = Instant::now();
        while began.elapsed() < LONG {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("it does not end: {}", self.log());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A whole life with everything that the sandbox has to let through.
fn live(daemon: &Daemon) -> Vm {
    let mut vm = daemon.vm();
    vm.start(ALL);
    vm.fill(PLAY, 8 * MIB);
    assert_eq!(vm.ask(3, &[(PLAY, 0x40_0000, true)]), 0x40_0000);
    assert_eq!(vm.pages_with_bitmap(&[0x2000], 1), (1, [vec![1], vec![0xff; 63]].concat()));
    vm.frontend.add_mem_region(&vm.region(RAM * 2, MIB, 0)).unwrap();
    vm.frontend.remove_mem_region(&vm.region(RAM * 2, MIB, 0)).unwrap();
    vm
}

use vhost::vhost_user::VhostUserFrontend;

#[test]
fn a_life_in_the_sandbox() {
    let mut daemon = Daemon::start(&["--metrics-socket", "metrics"]);
    let status = daemon.say(&["status"]);
    assert!(text(&status).starts_with("It does not work.\n  - no front end is connected"));
    let mut vm = live(&daemon);
    let screen = text(&daemon.say(&["status"]));
    for wanted in
        ["It works.", "4.0 MiB of it proven zero", "reporting running", "tmpfs", "sandbox    seccomp, "]
    {
        assert!(screen.contains(wanted), "{wanted} in\n{screen}");
    }
    assert!(screen.lines().count() <= 24, "one screen:\n{screen}");
    assert_eq!(text(&daemon.say(&["target"])), "target 0 MiB, the guest has given 0 MiB\n");
    assert_eq!(text(&daemon.say(&["target", "8M"])), "target 8 MiB, the guest has given 0 MiB\n");
    let late = daemon.say(&["target", "16M", "--wait", "1"]);
    assert_eq!(late.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&late.stderr).contains("after 1 s"));
    assert_eq!(daemon.say(&["stats"]).status.code(), Some(1), "the guest has sent none");
    assert_eq!(text(&daemon.say(&["discard", "off"])), "memory is kept\n");
    assert_eq!(text(&daemon.say(&["discard", "on"])), "memory is given back\n");
    let status: serde_json::Value = serde_json::from_str(&text(&daemon.say(&["status", "--json"]))).unwrap();
    assert_eq!(status["proven_zero"], 4 * MIB + PAGE);

    let answer = vm.metrics();
    assert!(answer.starts_with("HTTP/1.0 200 OK\r\n"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("Content-Length: {}", body.len())));
    assert!(body.contains("vhost_user_balloon_received_bytes_total{queue=\"reporting\"} 4194304"), "{body}");
    assert!(body.ends_with("# EOF\n"));
    assert!(vm.is_alive(3));
    vm.socket.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(eventually(|| daemon.log().contains("the front end has hung up")));
    // The next one.
    assert!(live(&daemon).is_alive(3));
    daemon.signal(15);
    assert!(daemon.end().success(), "{}", daemon.log());
}

#[test]
fn ends_on_sigterm() {
    for signal in [15, 2] {
        let mut daemon = Daemon::start(&[]);
        let mut vm = live(&daemon);
        // In the middle of a request of the front end.
        vm.socket.write_all(&[5, 0, 0, 0, 1, 0, 0, 0, 40, 0, 0, 0]).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        daemon.signal(signal);
        assert!(daemon.end().success());
        // It has not waited for the rest, which has a second to come.
        assert!(!daemon.log().contains("left a front end"), "{}", daemon.log());
    }
}

/// A pipe for standard error that has no room left; whether writing to it waits.
fn full_pipe(waits: bool) -> (std::os::fd::OwnedFd, std::os::fd::OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
    while rustix::io::write(&writer, b"x").is_ok() {}
    if waits {
        rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    }
    (reader, writer)
}

#[test]
fn the_log_is_not_read() {
    for broken in [true, false] {
        let (reader, writer) = full_pipe(false);
        let reader = (!broken).then_some(reader);
        let command = |_: &Path| Command::new(PROGRAM);
        let mut daemon = Daemon::start_with(&[], command, Some(writer.into()));
        let mut vm = live(&daemon);
        // Each is worth a line.
        assert_eq!(vm.ask(0, &[(RAM * 4, 8, false)]), 0);
        assert!(!vm.raw_accepted(13, &0_u64.to_ne_bytes(), &[vm.memory.as_raw_fd()]));
        assert!(vm.is_alive(3));
        vm.socket.shutdown(std::net::Shutdown::Both).unwrap();
        daemon.signal(15);
        assert!(daemon.end().success());
        drop(reader);
    }
}

#[test]
fn ends_on_sigterm_while_the_log_is_not_read() {
    // With something to say all the time, and with nothing at all.
    for level in ["trace", "error"] {
        let (reader, writer) = full_pipe(true);
        let command = |_: &Path| Command::new(PROGRAM);
        let mut daemon = Daemon::start_with(&["--log-level", level], command, Some(writer.into()));
        daemon.signal(15);
        assert!(daemon.end().success());
        drop(reader);
    }
}

#[test]
fn descriptors_that_are_passed() {
    // A connected socket, and one that listens, as service managers pass it.
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let path = folder.path().join("front");
    let listener = UnixListener::bind(&path).unwrap();
    let start = |fd: i32| {
        // The shell's redirection is the only way to pass a descriptor without unsafe code.
        Command::new("sh")
            .args(["-c", "exec \"$0\" --fd 3 --control \"$1\" 3<&0 </dev/null", PROGRAM])
            .arg(folder.path().join(format!("control-{fd}")))
            .stdin(if fd == 0 {
                Stdio::from(std::os::fd::OwnedFd::from(theirs.try_clone().unwrap()))
            } else {
                Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone().unwrap()))
            })
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut connected = start(0);
    let control = folder.path().join("control-0");
    let mut vm = Vm::with(ours, control, tempfile::tempdir().unwrap(), None);
    vm.start(DEFAULT);
    assert!(vm.is_alive(3));
    vm.socket.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(connected.wait().unwrap().success());

    let mut listening = start(1);
    for _ in 0..2 {
        let socket = UnixStream::connect(&path).unwrap();
        let mut vm = Vm::with(socket, folder.path().join("control-1"), tempfile::tempdir().unwrap(), None);
        vm.start(DEFAULT);
        assert!(vm.is_alive(3));
    }
    listening.kill().unwrap();
    listening.wait().unwrap();
}

/// A number that the parent has not passed is never one of the daemon's own descriptors.
#[test]
fn descriptors_that_are_not_passed() {
    for fd in ["3", "4", "5"] {
        let shell = "exec \"$0\" --fd \"$1\" 3<&- 4<&- 5<&- </dev/null";
        let ended = Command::new("sh").args(["-c", shell, PROGRAM, fd]).output().unwrap();
        assert_eq!(ended.status.code(), Some(1));
        let error = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(error.contains(&format!("cannot use descriptor {fd}: Bad file descriptor")), "{error}");
    }
}

/// Guest memory that the only front end truncates.
#[test]
fn memory_lost_without_another_front_end() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let child = Command::new("sh")
        .args(["-c", "exec \"$0\" --fd 3 --control \"$1\" 3<&0 </dev/null", PROGRAM])
        .arg(folder.path().join("control"))
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut vm = Vm::with(ours, folder.path().join("control"), tempfile::tempdir().unwrap(), None);
    vm.start(DEFAULT);
    vm.memory.set_len(0).unwrap();
    vm.kick(0);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(4));
    let error = "cannot touch guest memory: its file was truncated by the front end; restart the VMM";
    let log = String::from_utf8(ended.stderr).unwrap();
    assert!(log.contains(error), "{log}");
}

/// The program becomes the VMM, and the device ends with it.
#[test]
fn a_vmm_with_its_device() {
    let folder = tempfile::tempdir().unwrap();
    let vmm = folder.path().join("vmm");
    std::fs::write(
        &vmm,
        "#!/bin/sh\necho \"$@\"\nfd=${5##*fd=}\ntest -S /proc/self/fd/$fd || exit 3\nexit 7\n",
    )
    .unwrap();
    std::fs::set_permissions(&vmm, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let control = folder.path().join("control");
    let arguments = ["run", "--control", control.to_str().unwrap(), "--target", "1M", "--"];
    let ended =
        Command::new(PROGRAM).args(arguments).arg(&vmm).args(["-m", "share=on", "x"]).output().unwrap();
    let options = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.status.code(), Some(7), "{options}");
    assert!(options.starts_with("-m share=on x -chardev socket,id=vub,fd="), "{options}");
    assert!(options.trim_end().ends_with("virtio-id=5,num_vqs=5,vq_size=128,config_size=24"), "{options}");
    let has_ended = || UnixStream::connect(&control).is_err();
    assert!(eventually(has_ended), "the device has ended");
    // It may have ended before it made the socket.
    let _ = std::fs::remove_file(&control);
    // A process that outlives the VMM has the front end's socket, and does not keep the device.
    let control_path = control.to_str().unwrap();
    let shell = format!("until test -S {control_path}; do sleep 0.05; done; sleep 15 & exit 0 # share=on");
    let kept = ["run", "--control", control_path, "--", "sh", "-c", &shell];
    assert!(Command::new(PROGRAM).args(kept).stderr(Stdio::null()).status().unwrap().success());
    assert!(eventually(has_ended), "the device has ended");
    let private = Command::new(PROGRAM).args(["run", "--"]).arg(&vmm).output().unwrap();
    assert_eq!(private.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&private.stderr).contains("no option has share=on"));
    let missing = run(&["run", "--", "/nonexistent/vmm", "share=on"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("cannot start /nonexistent/vmm"));
    assert_eq!(
        text(&run(&["--socket-path", "/a,b", "--print-qemu-args"])),
        "-chardev socket,id=vub,path=/a,,b -device \
         vhost-user-test-device-pci,chardev=vub,virtio-id=5,num_vqs=5,vq_size=128,config_size=24\n"
    );
}

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn capabilities() {
    let printed: serde_json::Value = serde_json::from_str(&text(&run(&["--print-capabilities"]))).unwrap();
    assert_eq!(printed, serde_json::json!({ "type": "balloon", "features": [] }));
}

#[test]
fn wrong_use() {
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["--target", "lots"]).status.code(), Some(2));
    for fd in ["0", "2", "-1", "77"] {
        let ended = run(&[&format!("--fd={fd}")]);
        assert_eq!(ended.status.code(), Some(1), "{fd}");
        assert!(String::from_utf8_lossy(&ended.stderr).contains(&format!("descriptor {fd}")), "{ended:?}");
    }
    let nowhere = run(&["--socket-path", "/nonexistent/front"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("cannot listen on /nonexistent/front"));
    let missing = run(&["status", "--control", "/nonexistent/control"]);
    assert!(
        String::from_utf8_lossy(&missing.stderr).contains("cannot talk to a device at /nonexistent/control")
    );
}

#[test]
fn a_path_that_is_taken() {
    let daemon = Daemon::start(&[]);
    let path = daemon.path("front");
    let second = run(&["--socket-path", path.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&second.stderr).contains("another process listens there; end it"));
    assert!(path.exists(), "the first one still has it");
    // Nobody listens on this one any more, and this is no socket at all.
    let stale = daemon.path("stale");
    drop(UnixListener::bind(&stale).unwrap());
    let file = daemon.path("file");
    std::fs::write(&file, "precious").unwrap();
    assert_eq!(run(&["--socket-path", file.to_str().unwrap()]).status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    let mut third =
        Command::new(PROGRAM).arg("--socket-path").arg(&stale).stderr(Stdio::null()).spawn().unwrap();
    assert!(eventually(|| UnixStream::connect(&stale).is_ok()));
    let _ = third.kill();
    let _ = third.wait();
}

#[test]
fn only_the_same_user_can_connect() {
    use std::os::unix::fs::PermissionsExt;
    let daemon = Daemon::start(&[]);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o077;
    assert_eq!((mode(&daemon.path("front")), mode(&daemon.path("control"))), (0, 0));
}

#[test]
fn log_lines_for_machines() {
    let daemon = Daemon::start(&["--log-format", "json"]);
    let mut vm = live(&daemon);
    for _ in 0..1000 {
        vm.ask(0, &[(RAM * 4, 8, false)]);
    }
    assert!(eventually(|| daemon.log().contains("outside of memory")));
    let log = daemon.log();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().any(|line| line["level"] == "WARN" && line["address"] == RAM * 4));
    assert!(lines.len() < 40, "{} lines for a thousand mistakes", lines.len());
}

#[test]
fn log_levels() {
    // A mistake of the driver is a warning; that it is ready is only information.
    for (level, ready, warned) in [("info", true, true), ("warn", false, true), ("error", false, false)] {
        let daemon = Daemon::start(&["--log-level", level]);
        let mut vm = live(&daemon);
        vm.ask(0, &[(RAM * 4, 8, false)]);
        assert!(eventually(|| daemon.log().contains("outside of memory") == warned), "{level}");
        assert_eq!(daemon.log().contains("ready"), ready, "{level}");
    }
}

#[test]
fn the_service_manager_is_notified() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let name = format!("vhost-user-balloon-test-{}", std::process::id());
    let hidden = SocketAddr::from_abstract_name(&name).unwrap();
    for (socket, address) in [
        (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
        (UnixDatagram::bind_addr(&hidden).unwrap(), format!("@{name}").into()),
    ] {
        socket.set_read_timeout(Some(LONG)).unwrap();
        let daemon = Daemon::start_as(&[], |_| {
            let mut command = Command::new(PROGRAM);
            command.env("NOTIFY_SOCKET", &address);
            command
        });
        let mut output = [0; 64];
        let length = socket.recv(&mut output).unwrap();
        assert_eq!(output[..length].trim_ascii(), b"READY=1");
        // It is true: it is confined, and a front end that connects now is served.
        assert_eq!(daemon.about("Seccomp"), 2);
        assert!(live(&daemon).is_alive(3));
    }
    // Nobody listens there: it is served all the same.
    let daemon = Daemon::start_as(&[], |_| {
        let mut command = Command::new(PROGRAM);
        command.env("NOTIFY_SOCKET", "/nonexistent/notify");
        command
    });
    assert!(live(&daemon).is_alive(3));
    assert!(daemon.log().contains("cannot reach the service manager at /nonexistent/notify"));
}

/// Whoever cannot be confined is not ready: as under a service manager that forbids seccomp(2).
#[test]
fn ready_is_sent_from_the_sandbox() {
    use std::os::unix::process::CommandExt;
    if let Some(folder) = std::env::var_os("TRY_READY") {
        let refused = seccompiler::SeccompAction::Errno(1);
        let machine = std::env::consts::ARCH.try_into().unwrap();
        let rules = std::collections::BTreeMap::from([(libc::SYS_seccomp, Vec::new())]);
        let filter =
            seccompiler::SeccompFilter::new(rules, seccompiler::SeccompAction::Allow, refused, machine);
        let program: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
        seccompiler::apply_filter(&program).unwrap();
        let error = Command::new(PROGRAM)
            .args(["--socket-path", "front", "--log-level", "error"])
            .current_dir(folder)
            .exec();
        unreachable!("{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_nonblocking(true).unwrap();
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ready_is_sent_from_the_sandbox", "--nocapture"])
        .env("TRY_READY", folder.path())
        .env("NOTIFY_SOCKET", &path)
        .output()
        .unwrap();
    let errors = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("cannot confine the process by seccomp: ")
            && errors.contains("--seccomp off goes on without it"),
        "{errors}"
    );
    let output = socket.recv(&mut [0; 64]);
    assert_eq!(output.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "it has sent that it is ready");
}

#[test]
fn no_root_is_needed() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    let mut daemon = Daemon::start_as(&[], |folder| {
        // Another user may not get to where it was built.
        let program = folder.join("program");
        std::fs::copy(PROGRAM, &program).unwrap();
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        let mut command = Command::new(program);
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    });
    let mut vm = live(&daemon);
    assert!(vm.is_alive(3));
    assert_ne!(daemon.about("Uid"), 0);
    assert_eq!(daemon.about("NoNewPrivs"), 1);
    daemon.signal(15);
    assert!(daemon.end().success(), "{}", daemon.log());
}

/// Landlock confines the thread that asks for it, and those that it starts later.
#[test]
fn every_thread_is_confined() {
    // The filter would have this mark put on all of them.
    let mut daemon = Daemon::start(&["--seccomp", "off"]);
    let mut vm = live(&daemon);
    assert!(vm.is_alive(3));
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap();
    let marks: Vec<String> = tasks
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap())
        .map(|text| text.lines().find(|line| line.starts_with("NoNewPrivs:")).unwrap().to_owned())
        .collect();
    assert_eq!(marks, ["NoNewPrivs:\t1"; 12]);
    daemon.signal(15);
    assert!(daemon.end().success());
}

/// Neither memory nor descriptors nor the log grow with what is sent.
#[test]
fn nothing_is_unbounded() {
    let daemon = Daemon::start(&[]);
    let mut vm = live(&daemon);
    let longs = |values: &[u64]| -> Vec<u8> { values.iter().flat_map(|w| w.to_ne_bytes()).collect() };
    let list: Vec<u8> = (0..1_u32 << 20).flat_map(|n| (n.wrapping_mul(0x9e37_79b9)).to_le_bytes()).collect();
    vm.write(32 * MIB, &list);
    let round = |vm: &mut Vm, n: u64| {
        // Lists of all sizes, whose page frames are anywhere; reports of anything; nonsense.
        for length in [4, 1 << 14, 4 << 20] {
            vm.ask(0, &[(32 * MIB, length, false)]);
            vm.ask(1, &[(32 * MIB, length, false)]);
        }
        vm.ask(3, &[(n * 0x1234_5678, 0x1000, true)]);
        vm.put(2, &[(32 * MIB, 4 << 20, false)]);
        vm.kick(2);
        // The front end's requests, with descriptors that it replaces or that are refused.
        let ring = n % 4;
        let call = vm.rings[ring as usize].call.as_raw_fd();
        assert!(vm.raw_accepted(13, &longs(&[ring]), &[call]));
        assert!(!vm.raw_accepted(13, &longs(&[ring]), &[vm.memory.as_raw_fd()]));
        // The kick above has been heard; then no ring looks for memory that is not there.
        vm.status();
        assert!(!vm.raw_accepted(
            5,
            &[&[1_u8, 0, 0, 0, 0, 0, 0, 0][..], &longs(&[0, RAM * 2, USER, 0])].concat(),
            &[vm.memory.as_raw_fd()]
        ));
        vm.share_memory();
        vm.frontend.add_mem_region(&vm.region(RAM * 4, MIB, 0)).unwrap();
        vm.frontend.remove_mem_region(&vm.region(RAM * 4, MIB, 0)).unwrap();
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(vm.raw_accepted(21, &[], &[one.as_raw_fd()]));
        drop(UnixStream::connect(daemon.path("control")).unwrap());
    };
    for n in 0..8 {
        round(&mut vm, n);
    }
    vm.status();
    let (memory, descriptors) = (daemon.about("RssAnon"), daemon.descriptors());
    for n in 0..150 {
        round(&mut vm, n);
    }
    // A ring that makes no sense, and a driver that kicks it.
    vm.write(vm.rings[0].available() + 2, &40_000_u16.to_le_bytes());
    for _ in 0..2000 {
        vm.kick(0);
    }
    assert!(eventually(|| vm.status()["queues"][0]["state"] == "broken"));
    assert!(vm.is_alive(3));
    let grown = daemon.about("RssAnon").saturating_sub(memory);
    assert!(grown < 2048, "{grown} kB more than before");
    assert!(daemon.descriptors() <= descriptors + 1, "{descriptors}, then {}", daemon.descriptors());
    assert_eq!(daemon.about("Threads"), 12, "those of the table in README");
    assert!(daemon.log().len() < 100_000, "{} bytes of log", daemon.log().len());
}

/// The filter of each thread: what is not in its row ends the process.
#[test]
fn the_filters_kill() {
    // The daemon cannot be made to do it, so a thread that has the same filter does.
    if let Some(row) = std::env::var_os("TRY_FILTER") {
        try_filter(row.to_str().unwrap());
        unreachable!("the filter has let it through");
    }
    for row in ["no hole", "close", "standard error", "another file", "closer", "log", "calls", "signals"] {
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_filters_kill", "--nocapture"])
            .env("TRY_FILTER", row)
            .output()
            .unwrap();
        assert_eq!(ended.status.signal(), Some(31), "{row}: {ended:?}");
    }
}

fn try_filter(row: &str) {
    use vhost_user_balloon::sandbox::{Row, Seccomp, seccomp};
    let file = memfd(MIB);
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let state = memfd(0);
    let one = 1_u64.to_ne_bytes();
    let serves = |_: &str| Row::serves(0, Some(state.as_raw_fd()));
    let confine = |row| assert_eq!(seccomp(Seccomp::Kill, row).unwrap(), "seccomp");
    match row {
        "no hole" => {
            confine(serves(row));
            let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, hole, 0, 4096).unwrap();
            let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 2 * MIB);
        }
        "close" => {
            confine(serves(row));
            rustix::io::write(&event, &one).unwrap();
            drop(event);
        }
        "standard error" => {
            confine(serves(row));
            let _ = rustix::io::write(std::io::stderr(), &one);
        }
        "another file" => {
            confine(serves(row));
            rustix::io::pwrite(&state, &one, 0).unwrap();
            rustix::fs::ftruncate(&state, 0).unwrap();
            let _ = rustix::io::pwrite(&file, &one, 0);
        }
        "closer" => {
            confine(Row::closes(event.as_fd()));
            rustix::io::write(&event, &one).unwrap();
            drop(state);
            let _ = rustix::io::write(&file, &one);
        }
        "log" => {
            confine(Row::log());
            rustix::io::write(std::io::stderr(), b"a line\n").unwrap();
            let _ = rustix::io::write(&event, &one);
        }
        "calls" => {
            confine(Row::calls());
            drop(event);
        }
        _ => {
            confine(Row::signals());
            let _ = rustix::io::read(&event, &mut [0; 8]);
        }
    }
}

/// No file can be opened any more, where the kernel has landlock; else it logs that it has none.
#[test]
fn files_are_given_up() {
    if std::env::var_os("TRY_LANDLOCK").is_some() {
        let file = std::env::current_exe().unwrap();
        std::fs::File::open(&file).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, "").unwrap();
        let how = vhost_user_balloon::sandbox::landlock().unwrap();
        let opened = std::fs::File::open(&file);
        if how.starts_with("landlock") {
            assert_eq!(opened.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
            let removed = std::fs::remove_file(&other);
            assert_eq!(removed.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        } else {
            assert_eq!(how, "no landlock (not in this kernel)");
            opened.unwrap();
        }
        println!("sandbox: {how}");
        return;
    }
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "files_are_given_up", "--nocapture"])
        .env("TRY_LANDLOCK", "1")
        .output()
        .unwrap();
    let output = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{output}");
    let how = output.lines().find_map(|line| line.split_once("sandbox: ")).expect("it ran").1;
    // The program says the same of itself.
    let screen = text(&Daemon::start(&[]).say(&["status"]));
    assert!(screen.contains(how), "{how} in\n{screen}");
    let without = text(&Daemon::start(&["--landlock", "off"]).say(&["status"]));
    assert!(without.contains("no landlock (switched off)"), "{without}");
}
