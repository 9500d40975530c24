//! A browser of our own: where one is, how it is started, and how nothing of it is left.
//!
//! It has a private profile that is new each time, so that no account, cookie or extension of the user's is within
//! reach of what the canvas shows. On Unix it is steered through pipes, which nobody else can reach; it ends by
//! itself when they close, even if the node is killed. Elsewhere its port is on loopback.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::cdp::Connection;
use super::{Link, Options};
use crate::node::capabilities::program::{Group, find, is_program};

/// How long a browser may take to end by itself.
const GRACE: Duration = Duration::from_secs(1);
/// How long its profile is tried to be removed: its processes write until they notice that it has gone.
const REMOVAL: Duration = Duration::from_secs(1);
/// How often what has no event of its own is looked at.
const POLL: Duration = Duration::from_millis(20);
/// Browsers that speak the protocol, by the names that they have on PATH.
const NAMES: [&str; 8] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "microsoft-edge-stable",
    "msedge",
];
/// No first steps, no accounts, no updates and nothing else of its own accord; what a page may not do without asking
/// is denied, and it opens no windows.
const FLAGS: [&str; 16] = [
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-sync",
    "--disable-quic",
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--block-new-web-contents",
    "--deny-permission-prompts",
    "--password-store=basic",
];

/// Names and addresses of this computer and of private networks, as the browser's rules have them.
const PRIVATE: [&str; 39] = [
    "localhost",
    "*.localhost",
    "*.local",
    "*.internal",
    "*.lan",
    "*.home.arpa",
    "0.*",
    "10.*",
    "127.*",
    "169.254.*",
    "172.16.*",
    "172.17.*",
    "172.18.*",
    "172.19.*",
    "172.2?.*",
    "172.30.*",
    "172.31.*",
    "192.168.*",
    "100.6?.*",
    "100.7?.*",
    "100.8?.*",
    "100.9?.*",
    "100.10?.*",
    "100.11?.*",
    "100.12?.*",
    "::*",
    "[::*",
    "fc*:*",
    "[fc*",
    "fd*:*",
    "[fd*",
    "fe8*:*",
    "[fe8*",
    "fe9*:*",
    "[fe9*",
    "fea*:*",
    "[fea*",
    "feb*:*",
    "[feb*",
];

/// The flag that lets no page reach them, whatever leads there: an address, a redirect, a script, a picture. Names that
/// a stranger's server resolves to them get through.
fn private_network_rules() -> String {
    let rules: Vec<String> = PRIVATE.iter().map(|pattern| format!("MAP {pattern} ~NOTFOUND")).collect();
    format!("--host-resolver-rules={}", rules.join(", "))
}

/// The browser to use: the one of the options, or the first that is found.
pub(super) fn program(options: &Options) -> Option<PathBuf> {
    match &options.program {
        Some(program) => is_program(program).then(|| program.clone()),
        None => NAMES.into_iter().find_map(find).or_else(|| installed().into_iter().find(|path| is_program(path))),
    }
}

/// Where browsers are installed that are not on PATH.
#[cfg(windows)]
fn installed() -> Vec<PathBuf> {
    let roots = ["ProgramFiles(x86)", "ProgramFiles", "LOCALAPPDATA"];
    let roots: Vec<PathBuf> = roots.into_iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    let below = [r"Microsoft\Edge\Application\msedge.exe", r"Google\Chrome\Application\chrome.exe"];
    below.into_iter().flat_map(|path| roots.iter().map(move |root| root.join(path))).collect()
}

/// Where browsers are installed that are not on PATH.
#[cfg(target_os = "macos")]
fn installed() -> Vec<PathBuf> {
    let names = ["Google Chrome", "Microsoft Edge", "Chromium"];
    names.map(|name| format!("/Applications/{name}.app/Contents/MacOS/{name}").into()).to_vec()
}

/// Where browsers are installed that are not on PATH.
#[cfg(not(any(windows, target_os = "macos")))]
fn installed() -> [PathBuf; 0] {
    []
}

/// Whether there is no screen to show a window on.
pub(super) fn is_headless(options: &Options) -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let has_display = cfg!(any(windows, target_os = "macos")) || is_set("DISPLAY") || is_set("WAYLAND_DISPLAY");
    options.headless.unwrap_or(!has_display)
}

/// A browser that runs. It ends when this is dropped.
pub(super) struct Browser {
    // Dropped in this order: closed pipes let it end, the group ends what is left, then nobody writes any more.
    pub(super) connection: Connection,
    group: Group,
    profile: Profile,
}

impl Browser {
    /// Starts one, with an empty page.
    pub(super) async fn start(program: &Path, options: &Options) -> io::Result<Self> {
        let profile = Profile::create(options.profiles.as_deref())?;
        let mut command = match options.link {
            #[cfg(unix)]
            Link::Pipe => {
                // The browser's ends of the pipes must be 3 and 4, and only a shell can put them there safely.
                let mut shell = Command::new("/bin/sh");
                shell.args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null"#]).arg(program);
                shell.arg("--remote-debugging-pipe").stdin(Stdio::piped()).stdout(Stdio::piped());
                shell
            }
            Link::Port => {
                let mut command = Command::new(program);
                command.args(["--remote-debugging-port=0", "--remote-debugging-address=127.0.0.1"]);
                command.stdin(Stdio::null()).stdout(Stdio::null());
                command
            }
        };
        command.stderr(Stdio::null()).args(FLAGS);
        let mut folder = OsString::from("--user-data-dir=");
        folder.push(&profile.0);
        command.arg(folder);
        if !options.reaches_private_network {
            command.arg(private_network_rules());
        }
        if profile.is_roots() {
            // A sandbox cannot be set up by root, and without this flag the browser would not start at all.
            tracing::warn!("the canvas's browser runs as root, and so without its sandbox");
            command.arg("--no-sandbox");
        }
        if is_headless(options) {
            command.args(["--headless", "--disable-gpu", "about:blank"]);
        } else {
            if cfg!(target_os = "linux") {
                command.arg("--ozone-platform-hint=auto");
            }
            command.arg("--app=about:blank");
        }
        let mut group = Group::start(command)?;
        let connection = match (group.0.stdin().take(), group.0.stdout().take()) {
            (Some(stdin), Some(stdout)) => Connection::over_pipes(stdin, stdout),
            _ => {
                let (port, path) = profile.endpoint().await?;
                Connection::over_socket(port, &path).await?
            }
        };
        Ok(Browser { connection, group, profile })
    }

    /// Ends it and waits until nothing of it is left.
    pub(super) async fn end(self) {
        let Browser { connection, group, profile } = self;
        drop(connection);
        group.end(GRACE).await;
        let _removed = tokio::task::spawn_blocking(move || drop(profile)).await;
    }
}

/// The folder of a browser's own files, which is removed when this is dropped.
struct Profile(PathBuf);

impl Profile {
    fn create(parent: Option<&Path>) -> io::Result<Self> {
        let name = format!("openclaw-canvas-{}", uuid::Uuid::new_v4().simple());
        let path = parent.map_or_else(std::env::temp_dir, Path::to_owned).join(name);
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(false);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path)?;
        Ok(Profile(path))
    }

    /// Whether it is root's, who made it: that is who runs the browser, too.
    fn is_roots(&self) -> bool {
        #[cfg(unix)]
        return self.0.metadata().is_ok_and(|folder| std::os::unix::fs::MetadataExt::uid(&folder) == 0);
        #[cfg(not(unix))]
        false
    }

    /// Waits until the browser has written down where it listens: its port, and a path.
    async fn endpoint(&self) -> io::Result<(u16, String)> {
        let file = self.0.join("DevToolsActivePort");
        loop {
            // Whoever waits for this has a deadline.
            if let Ok(text) = std::fs::read_to_string(&file)
                && let Some((port, path)) = text.split_once('\n')
                && let Ok(port) = port.trim().parse()
            {
                return Ok((port, path.trim().to_owned()));
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        let since = std::time::Instant::now();
        while let Err(error) = std::fs::remove_dir_all(&self.0) {
            if error.kind() == io::ErrorKind::NotFound {
                break;
            }
            if since.elapsed() > REMOVAL {
                tracing::warn!(folder = %self.0.display(), %error, "a browser's profile is left behind");
                break;
            }
            std::thread::sleep(POLL);
        }
    }
}
