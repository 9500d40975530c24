//! Programs that capabilities start: where they are, and running one within its bounds.
//!
//! A program is the leader of a group of its own. When its time is over, or nobody wants it any more, the whole group
//! ends, so that nothing that it started is left behind.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use process_wrap::tokio::{ChildWrapper, CommandWrap};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

/// How long output is still awaited when a program has ended: what it started may hold its pipes open for ever.
const PIPE_LINGER: Duration = Duration::from_millis(500);
/// The bytes of one read.
const CHUNK_BYTES: usize = 16 * 1024;

/// The program of this name on PATH. A name with a folder in it is none.
pub fn find(name: &str) -> Option<PathBuf> {
    find_on(&std::env::var_os("PATH")?, name)
}

/// The program of this name in one of the folders of `path`.
pub fn find_on(path: &OsStr, name: &str) -> Option<PathBuf> {
    if name.is_empty() || name.contains(['/', '\\', '\0']) || (cfg!(windows) && name.contains(':')) {
        return None;
    }
    // A relative entry would make the answer depend on where the node was started.
    let folders = std::env::split_paths(path).filter(|folder| folder.is_absolute());
    folders.flat_map(|folder| candidates(&folder, name)).find(|program| is_program(program))
}

#[cfg(not(windows))]
fn candidates(folder: &Path, name: &str) -> Vec<PathBuf> {
    vec![folder.join(name)]
}

#[cfg(windows)]
fn candidates(folder: &Path, name: &str) -> Vec<PathBuf> {
    let extensions = std::env::var("PATHEXT").unwrap_or_else(|_| ".COM;.EXE;.BAT;.CMD".to_owned());
    let extensions = extensions.to_lowercase();
    let with_extension =
        extensions.split(';').filter(|e| e.starts_with('.')).map(|e| folder.join(format!("{name}{e}")));
    let own = name.contains('.').then(|| folder.join(name));
    own.into_iter().chain(with_extension).collect()
}

/// Whether a file can be run.
#[cfg(unix)]
pub fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Whether a file can be run.
#[cfg(not(unix))]
pub fn is_program(path: &Path) -> bool {
    path.is_file()
}

/// What a run may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Until it is stopped.
    pub time: Duration,
    /// The most bytes that are kept of each of its outputs; the rest is read and thrown away.
    pub output: usize,
}

/// How a run ended.
#[derive(Debug)]
pub enum Exit {
    /// By itself, with this code; without one, if a signal ended it.
    Code(Option<i32>),
    /// Its time was over.
    TimedOut,
    /// Nobody wanted it any more.
    Cancelled,
    /// It could not be started.
    NotStarted(io::Error),
}

/// What came of a run.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub exit: Exit,
    /// What it wrote.
    pub stdout: Captured,
    /// What it complained about.
    pub stderr: Captured,
}

impl Ended {
    /// Whether it ended by itself and without an error.
    pub fn is_success(&self) -> bool {
        matches!(self.exit, Exit::Code(Some(0)))
    }
}

/// What was kept of an output.
#[derive(Debug, Default)]
pub struct Captured {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// There were more.
    pub is_truncated: bool,
}

/// Runs a program to its end with `input` as its stdin. Dropping the future ends it, too.
pub async fn run(mut command: Command, input: &[u8], bounds: Bounds, cancel: &CancellationToken) -> Ended {
    command.stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (mut stdout, mut stderr) = (Captured::default(), Captured::default());
    let mut group = match Group::start(command) {
        Ok(group) => group,
        Err(error) => return Ended { exit: Exit::NotStarted(error), stdout, stderr },
    };
    let (stdin, out, err) = (group.0.stdin().take(), group.0.stdout().take(), group.0.stderr().take());
    let exit = {
        let feed = async {
            if let Some(mut stdin) = stdin {
                // A program need not read all of it.
                let _closed = stdin.write_all(input).await;
            }
        };
        let outputs = async {
            tokio::join!(feed, read(out, bounds.output, &mut stdout), read(err, bounds.output, &mut stderr));
        };
        tokio::pin!(outputs);
        let mut are_read = false;
        let ended = async {
            let status = loop {
                tokio::select! {
                    status = group.0.wait() => break status,
                    () = &mut outputs, if !are_read => are_read = true,
                }
            };
            if !are_read {
                let _held_open = tokio::time::timeout(PIPE_LINGER, &mut outputs).await;
            }
            status
        };
        tokio::select! {
            status = tokio::time::timeout(bounds.time, ended) => match status {
                Ok(Ok(status)) => Exit::Code(status.code()),
                Ok(Err(error)) => Exit::NotStarted(error),
                Err(_) => Exit::TimedOut,
            },
            () = cancel.cancelled() => Exit::Cancelled,
        }
    };
    match exit {
        Exit::Code(_) => group.1 = true,
        // Reaped here, so that nothing of it is left when its end is told.
        _ => {
            let _gone = group.0.start_kill();
            let _reaped = tokio::time::timeout(PIPE_LINGER, group.0.wait()).await;
        }
    }
    Ended { exit, stdout, stderr }
}

/// A program with whatever it starts, and whether it has ended by itself.
#[derive(Debug)]
pub struct Group(pub Box<dyn ChildWrapper>, bool);

impl Group {
    /// Starts a program as the leader of a group. The group ends when this is dropped.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(mut command: Command) -> io::Result<Self> {
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_secret(name)) {
            command.env_remove(name);
        }
        // A Windows job that is killed when it is dropped would take along what is to go on after the program's end.
        command.kill_on_drop(true);
        as_group(command).spawn().map(|child| Group(child, false))
    }

    /// Waits until it ends by itself, for `grace` at the most, and then ends it.
    pub async fn end(mut self, grace: Duration) {
        self.1 = tokio::time::timeout(grace, self.0.wait()).await.is_ok();
        if !self.1 {
            let _gone = self.0.start_kill();
            let _reaped = tokio::time::timeout(PIPE_LINGER, self.0.wait()).await;
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.1 {
            let _gone = self.0.start_kill();
        }
    }
}

/// A command whose program will be the leader of a group of its own, so that Ctrl-C in our terminal does not reach it.
pub fn as_group(command: Command) -> CommandWrap {
    let mut command = CommandWrap::from(command);
    #[cfg(unix)]
    command.wrap(process_wrap::tokio::ProcessGroup::leader());
    #[cfg(windows)]
    {
        // Its console is its own, too, and opens no window.
        command.wrap(process_wrap::tokio::CreationFlags(windows::Win32::System::Threading::CREATE_NO_WINDOW));
        command.wrap(process_wrap::tokio::JobObject);
    }
    command
}

/// Whether a variable is one of ours that opens something. No program is told those.
fn is_secret(name: &OsStr) -> bool {
    let name = name.to_string_lossy().to_ascii_uppercase();
    name.starts_with("OPENCLAW_") && ["TOKEN", "SECRET", "KEY"].iter().any(|word| name.contains(word))
}

async fn read(source: Option<impl AsyncRead + Unpin>, limit: usize, kept: &mut Captured) {
    let Some(mut source) = source else { return };
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(count @ 1..) = source.read(&mut chunk).await {
        let fits = count.min(limit - kept.bytes.len());
        kept.bytes.extend_from_slice(&chunk[..fits]);
        kept.is_truncated |= fits < count;
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::time::Instant;

    const BOUNDS: Bounds = Bounds { time: Duration::from_secs(10), output: 100 };

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn outputs_input_and_code_are_told_and_bounded() {
        let cancel = CancellationToken::new();
        let ended = run(shell("cat; echo oops >&2; exit 3"), b"hello", BOUNDS, &cancel).await;
        assert!(matches!(ended.exit, Exit::Code(Some(3))) && !ended.is_success());
        assert_eq!((&*ended.stdout.bytes, &*ended.stderr.bytes), (&b"hello"[..], &b"oops\n"[..]));
        for (size, is_truncated) in [(100, false), (101, true), (200_000, true)] {
            let ended = run(shell(&format!("head -c {size} /dev/zero")), b"", BOUNDS, &cancel).await;
            assert!(ended.is_success(), "it may write on");
            assert_eq!((ended.stdout.bytes.len(), ended.stdout.is_truncated), (100, is_truncated));
        }
        let missing = run(Command::new("/no/such/program"), b"", BOUNDS, &cancel).await;
        assert!(matches!(missing.exit, Exit::NotStarted(_)));
    }

    /// Whether a process is still there, and no zombie.
    fn is_alive(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn what_a_program_started_ends_with_it() {
        let script = "sleep 1000 & echo $!; wait";
        let bounds = Bounds { time: Duration::from_millis(300), ..BOUNDS };
        let late = run(shell(script), b"", bounds, &CancellationToken::new()).await;
        let cancel = CancellationToken::new();
        let (cancelled, ()) = tokio::join!(run(shell(script), b"", BOUNDS, &cancel), async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            cancel.cancel();
        });
        assert!(matches!((&late.exit, &cancelled.exit), (Exit::TimedOut, Exit::Cancelled)));
        for ended in [late, cancelled] {
            let pid = String::from_utf8(ended.stdout.bytes).unwrap();
            let since = Instant::now();
            while is_alive(pid.trim()) {
                assert!(since.elapsed() < Duration::from_secs(5), "{pid} is left behind");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }

    #[tokio::test]
    async fn a_pipe_that_is_held_open_delays_the_end_only_a_little() {
        let since = Instant::now();
        let ended = run(shell("sleep 3 & echo done"), b"", BOUNDS, &CancellationToken::new()).await;
        assert!(ended.is_success());
        assert_eq!(ended.stdout.bytes, b"done\n");
        assert!(since.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn the_nodes_own_secrets_are_known_by_their_names() {
        for secret in ["OPENCLAW_PROXY_APP_TOKEN", "OPENCLAW_NODE_BROWSER_CONTROL_TOKEN", "openclaw_mcp_token"] {
            assert!(is_secret(OsStr::new(secret)), "{secret}");
        }
        for other in ["PATH", "OPENCLAW_PROXY_SERVER_URL", "GITHUB_TOKEN"] {
            assert!(!is_secret(OsStr::new(other)), "{other}");
        }
    }

    #[test]
    fn only_files_that_can_be_run_are_programs_and_the_first_one_counts() {
        use std::os::unix::fs::PermissionsExt;
        let root = std::env::temp_dir().join(format!("openclaw-which-{}", std::process::id()));
        let (first, second) = (root.join("1"), root.join("2"));
        std::fs::create_dir_all(first.join("folder")).unwrap();
        std::fs::create_dir_all(&second).unwrap();
        for (file, mode) in [(first.join("tool"), 0o644), (second.join("tool"), 0o755), (first.join("text"), 0o644)] {
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let path = std::env::join_paths([PathBuf::from("relative"), first, second.clone()]).unwrap();
        assert_eq!(find_on(&path, "tool"), Some(second.join("tool")));
        assert_eq!((find_on(&path, "text"), find_on(&path, "folder")), (None, None));
        std::fs::remove_dir_all(root).unwrap();
    }
}

#[cfg(all(test, windows))]
mod tests {
    use super::*;
    use std::time::Instant;

    use sysinfo::{Pid, Process, ProcessRefreshKind, ProcessesToUpdate, System};

    const BOUNDS: Bounds = Bounds { time: Duration::from_secs(20), output: 100 };

    fn shell(script: &str) -> Command {
        let mut command = Command::new("cmd.exe");
        // cmd.exe has rules of its own for quotes.
        command.arg("/c").raw_arg(script);
        command
    }

    /// A folder of one test, removed at its end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("openclaw-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[tokio::test]
    async fn outputs_input_and_code_are_told_and_bounded() {
        let cancel = CancellationToken::new();
        let ended = run(shell("find \"e\" & echo oops>&2& exit 3"), b"hello\r\n", BOUNDS, &cancel).await;
        assert!(matches!(ended.exit, Exit::Code(Some(3))) && !ended.is_success(), "{ended:?}");
        assert_eq!((&*ended.stdout.bytes, &*ended.stderr.bytes), (&b"hello\r\n"[..], &b"oops\r\n"[..]));
        let ended = run(shell("for /L %i in (1,1,30) do @echo 12345678"), b"", BOUNDS, &cancel).await;
        assert!(ended.is_success() && ended.stdout.bytes.len() == 100 && ended.stdout.is_truncated, "{ended:?}");
        let missing = run(Command::new("no-such-program"), b"", BOUNDS, &cancel).await;
        assert!(matches!(missing.exit, Exit::NotStarted(_)));
    }

    /// The pings that our programs have started.
    fn grandchildren() -> Vec<Pid> {
        let mut system = System::new();
        system.refresh_processes_specifics(ProcessesToUpdate::All, true, ProcessRefreshKind::nothing());
        let parent = |pid: Pid| system.process(pid)?.parent();
        let us = Some(Pid::from_u32(std::process::id()));
        let pings = system.processes().values().filter(|process| process.name().eq_ignore_ascii_case("ping.exe"));
        pings.map(Process::pid).filter(|pid| parent(*pid).and_then(parent) == us).collect()
    }

    async fn until(what: &str, condition: impl Fn() -> bool) {
        let since = Instant::now();
        while !condition() {
            assert!(since.elapsed() < Duration::from_secs(15), "{what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn what_a_program_started_ends_with_it() {
        for is_cancelled in [false, true] {
            let script = "ping -n 1000 127.0.0.1 >nul & exit 1";
            let bounds = if is_cancelled { BOUNDS } else { Bounds { time: Duration::from_secs(5), ..BOUNDS } };
            let cancel = CancellationToken::new();
            let (ended, started) = tokio::join!(run(shell(script), b"", bounds, &cancel), async {
                until("nothing is started", || !grandchildren().is_empty()).await;
                let started = grandchildren();
                if is_cancelled {
                    cancel.cancel();
                }
                started
            });
            assert!(matches!((ended.exit, is_cancelled), (Exit::TimedOut, false) | (Exit::Cancelled, true)));
            until("it is left behind", || !grandchildren().iter().any(|pid| started.contains(pid))).await;
        }
    }

    #[tokio::test]
    async fn a_program_that_ends_by_itself_may_leave_others_behind() {
        let folder = Folder::new("left-behind");
        let file = folder.0.join("file");
        let script = format!("start /b cmd /c \"ping -n 8 127.0.0.1 & echo x>{}\" & echo done", file.display());
        let since = Instant::now();
        let ended = run(shell(&script), b"", BOUNDS, &CancellationToken::new()).await;
        assert!(ended.is_success(), "{ended:?}");
        assert!(since.elapsed() < Duration::from_secs(5), "a pipe that is held open delays the end only a little");
        assert!(!file.exists());
        until("it has not gone on", || file.exists()).await;
        // Whoever wrote it may still have it open.
        until("it does not end", || std::fs::remove_file(&file).is_ok()).await;
    }

    #[test]
    fn a_bare_name_is_found_by_the_endings_that_windows_knows() {
        let folder = Folder::new("pathext");
        for name in ["tool.cmd", "tool.txt", "text.txt", "own.cmd.exe"] {
            std::fs::write(folder.0.join(name), "").unwrap();
        }
        std::fs::create_dir(folder.0.join("folder.exe")).unwrap();
        let found = |name: &str| find_on(folder.0.as_os_str(), name);
        assert_eq!(found("tool"), Some(folder.0.join("tool.cmd")));
        assert_eq!(found("tool.cmd"), Some(folder.0.join("tool.cmd")));
        assert_eq!(found("own.cmd"), Some(folder.0.join("own.cmd.exe")));
        assert_eq!([found("text"), found("folder"), found("c:tool"), found("..")], [const { None }; 4]);
    }
}
