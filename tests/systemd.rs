//! systemd: a socket that it passes on, what it hears, and its units. And listening on a Unix socket.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixDatagram, UnixStream};
use tokio::process::{Child, Command};
use tokio::task::{JoinHandle, JoinSet};

use crate::program::{PROGRAM, program_by, serve};
use crate::support::{App, McpClient, PATIENCE, http, send, soon, tools, until};

const TOKENS: [(&str, &str); 2] = [("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")];

/// A folder of one test, short enough for the path of a Unix socket.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("ocp-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&folder).unwrap();
        Folder(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left_behind = std::fs::remove_dir_all(&self.0);
    }
}

/// The program behind an open socket, as systemd starts it. The shell makes the process's own id known to it.
fn activated(socket: impl Into<std::os::fd::OwnedFd>, count: u8, settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"LISTEN_PID=$$ LISTEN_FDS=$1 exec "$0" 3<&0 0</dev/null"#, PROGRAM, &count.to_string()]);
    let mut command = program_by(command, settings);
    command.stdin(Stdio::from(socket.into()));
    command
}

async fn terminate(child: &mut Child) {
    let pid = child.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    assert!(soon(child.wait()).await.unwrap().success());
}

/// An app that lends a tool, and a client that calls it.
async fn lends_and_calls(base: &str) {
    let app = App::register_at_as(base, json!({ "device_id": "d", "tools": tools(&["echo"]) }), "app-token").await;
    let echo = app.connect().await.echo();
    let client = McpClient::new(&app.mcp_url).header("authorization", "Bearer claw-token");
    let result = client.call("echo", r#"{"x":1}"#).await.tool_text();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&result).unwrap(), json!({ "x": 1 }));
    echo.abort();
}

/// Carries TCP connections to a Unix socket, so that every client can reach it.
async fn through_unix(path: String) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let carrying = tokio::spawn(async move {
        let mut tunnels = JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            let Ok(mut server) = UnixStream::connect(&path).await else { continue };
            tunnels.spawn(async move { _ = copy_bidirectional(&mut client, &mut server).await });
        }
    });
    (base, carrying)
}

#[tokio::test]
async fn a_socket_that_systemd_passes_on_wins_over_the_setting() {
    let folder = Folder::new();
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    for listen in [format!("127.0.0.1:{port}"), folder.path("proxy.sock")] {
        let mut command = Command::new("systemd-socket-activate");
        command.args([format!("--listen={listen}")]);
        for (name, value) in TOKENS {
            command.arg(format!("--setenv=OPENCLAW_PROXY_{name}={value}"));
        }
        command.args(["--setenv=OPENCLAW_PROXY_LISTEN=192.0.2.1:9", PROGRAM]);
        let mut command = program_by(command, &[]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("systemd-socket-activate is there; install it: apt-get install systemd");
        let (base, tunnel) = if listen.starts_with('/') {
            through_unix(listen.clone()).await
        } else {
            (format!("http://{listen}"), tokio::spawn(async {}))
        };
        // The first connection starts the program.
        until(async || http().get(format!("{base}/health")).send().await.is_ok()).await;
        lends_and_calls(&base).await;
        terminate(&mut child).await;
        // The socket's file is systemd's to remove.
        assert!(!listen.starts_with('/') || Path::new(&listen).exists());
        tunnel.abort();
    }
}

#[tokio::test]
async fn whoever_comes_while_the_program_restarts_waits_in_the_socket_of_systemd() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let start = async || serve(activated(listener.try_clone().unwrap(), 1, &TOKENS)).await.0;
    let mut child = start().await;
    lends_and_calls(&base).await;
    terminate(&mut child).await;
    let health = http().get(format!("{base}/health"));
    let waiting = tokio::spawn(send(health));
    assert!(TcpStream::connect(listener.local_addr().unwrap()).await.is_ok(), "nobody is refused");
    let mut child = start().await;
    assert_eq!(waiting.await.unwrap().text, "ok");
    terminate(&mut child).await;
}

#[tokio::test]
async fn what_systemd_passes_on_must_be_one_socket_that_is_safe() {
    let listener = |address: &str| std::net::TcpListener::bind(address).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    for (command, says) in [
        (activated(listener("0.0.0.0:0"), 1, &[]), "OPENCLAW_PROXY_APP_TOKEN is empty and 0.0.0.0:"),
        (activated(listener("127.0.0.1:0"), 2, &TOKENS), "2 sockets were passed on"),
        (activated(null, 1, &TOKENS), "fd 3 is not a socket"),
    ] {
        let mut command = command;
        let output = soon(command.output()).await.unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(78), "{stderr}");
        assert!(stderr.contains(says) && !stderr.contains("panicked"), "{stderr}");
    }
    // A variable that was meant for another process changes nothing.
    let mut command = Command::new(PROGRAM);
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    let mut command = program_by(command, &[("LISTEN", "127.0.0.1:0")]);
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    terminate(&mut serve(command).await.0).await;
}

/// The next message to systemd that is no sign of life.
async fn heard(socket: &UnixDatagram) -> String {
    loop {
        let message = next(socket).await;
        if !message.contains("WATCHDOG=1") {
            return message;
        }
    }
}

async fn next(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 4096];
    let len = soon(socket.recv(&mut buffer)).await.unwrap();
    String::from_utf8(buffer[..len].to_vec()).unwrap()
}

#[tokio::test]
async fn systemd_hears_when_the_program_serves_lives_reloads_and_stops() {
    let folder = Folder::new();
    let path = folder.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut command = program_by(Command::new(PROGRAM), &[&TOKENS[..], &[("LISTEN", "127.0.0.1:0")]].concat());
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "100000");
    let starting = tokio::spawn(serve(command));
    assert_eq!(next(&socket).await, "READY=1\nSTATUS=0 chat sessions\n");
    let (mut child, base) = soon(starting).await.unwrap();
    // What it says is true: it serves, and counts.
    App::register_at_as(&base, json!({ "device_id": "d" }), "app-token").await;
    let alive = async {
        let mut counted = 0;
        while counted < 3 {
            counted += usize::from(next(&socket).await == "WATCHDOG=1\nSTATUS=1 chat sessions\n");
        }
    };
    tokio::time::timeout(Duration::from_secs(5), alive).await.expect("signs of life come twice in the time");
    let signal = async |name: &str| {
        let pid = child.id().unwrap().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().await.unwrap().success());
    };
    signal("-HUP").await;
    let reloading = heard(&socket).await;
    let since = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").and_then(|rest| rest.trim().parse::<u64>().ok());
    assert!(since.is_some_and(|since| since > 0), "{reloading}");
    assert_eq!(heard(&socket).await, "READY=1\n");
    // A call that is still under way holds the end up, and the signs of life go on until then.
    let app = App::register_at_as(&base, json!({ "device_id": "d", "tools": tools(&["slow"]) }), "app-token").await;
    let mut bridge = app.connect().await;
    let client = McpClient::new(&app.mcp_url).header("authorization", "Bearer claw-token");
    let call = client.spawn_call("1", "slow", "{}");
    let (id, _, _) = bridge.invoked().await;
    signal("-TERM").await;
    assert_eq!(heard(&socket).await, "STOPPING=1\n");
    assert!(next(&socket).await.starts_with("WATCHDOG=1\n"));
    bridge.answer(&id, r#""ok":true,"content":"the end""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "the end");
    drop(bridge);
    assert!(soon(child.wait()).await.unwrap().success());
}

#[tokio::test]
async fn a_watchdog_that_is_meant_for_another_process_hears_nothing() {
    let folder = Folder::new();
    let path = folder.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut command = program_by(Command::new(PROGRAM), &[("LISTEN", "127.0.0.1:0")]);
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "1000").env("WATCHDOG_PID", "1");
    let mut child = serve(command).await.0;
    assert!(next(&socket).await.starts_with("READY=1\n"));
    terminate(&mut child).await;
    assert_eq!(next(&socket).await, "STOPPING=1\n");
}

#[tokio::test]
async fn a_unix_socket_carries_calls_and_its_peers_count_as_this_machine() {
    let folder = Folder::new();
    let path = folder.path("proxy.sock");
    let listen = format!("unix:{path}");
    for (trusted, believed) in [("", true), ("10.0.0.0/8", false)] {
        let settings = [&TOKENS[..], &[("LISTEN", listen.as_str()), ("TRUSTED_PROXIES", trusted)]].concat();
        let (mut child, url) = serve(program_by(Command::new(PROGRAM), &settings)).await;
        assert_eq!(url, listen);
        let (base, tunnel) = through_unix(path.clone()).await;
        lends_and_calls(&base).await;
        let request = http().post(format!("{base}/v1/chat/sessions")).bearer_auth("app-token");
        let request = request.header("x-forwarded-proto", "https").header("x-forwarded-host", "mcp.example");
        let reply = send(request.json(&json!({ "device_id": "d" }))).await;
        let mcp_url = reply.json()["mcp_url"].as_str().unwrap().to_owned();
        let expected = if believed { "https://mcp.example" } else { &base };
        assert!(mcp_url.starts_with(expected), "{mcp_url}");
        let mut health = program_by(Command::new(PROGRAM), &[("LISTEN", &listen)]);
        assert!(soon(health.arg("health").output()).await.unwrap().status.success());
        terminate(&mut child).await;
        assert!(!Path::new(&path).exists(), "it is removed at the end");
        assert_eq!(soon(health.output()).await.unwrap().status.code(), Some(1));
        tunnel.abort();
    }
}

#[tokio::test]
async fn the_umask_says_who_may_open_the_unix_socket() {
    let folder = Folder::new();
    let path = folder.path("proxy.sock");
    let listen = format!("unix:{path}");
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"umask 0007; exec "$0""#, PROGRAM]);
    let (mut child, _) = serve(program_by(command, &[("LISTEN", &listen)])).await;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o770);
    terminate(&mut child).await;
}

#[tokio::test]
async fn only_a_socket_that_was_left_behind_is_replaced() {
    let folder = Folder::new();
    let path = folder.path("proxy.sock");
    let listen = format!("unix:{path}");
    let program = || program_by(Command::new(PROGRAM), &[("LISTEN", listen.as_str())]);
    // What is killed removes nothing.
    let (mut killed, _) = serve(program()).await;
    killed.kill().await.unwrap();
    assert!(Path::new(&path).exists());
    let (mut second, _) = serve(program()).await;
    // One that listens stays, and so does what is no socket.
    let refused = async || {
        let output = soon(program().output()).await.unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && stderr.contains(&listen), "{stderr}");
    };
    refused().await;
    terminate(&mut second).await;
    std::fs::write(&path, "a file of somebody's").unwrap();
    refused().await;
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file of somebody's");
    std::fs::remove_file(&path).unwrap();
}

/// Both units, with a program that is really there.
fn units(folder: &Folder) -> [String; 2] {
    ["openclaw-mcp-proxy.service", "openclaw-mcp-proxy.socket"].map(|name| {
        let unit = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name)).unwrap();
        let installed = "ExecStart=/usr/local/bin/openclaw-mcp-proxy\n";
        assert_eq!(unit.matches(installed).count(), usize::from(name.ends_with("service")), "{name}");
        std::fs::write(folder.path(name), unit.replace(installed, &format!("ExecStart={PROGRAM}\n"))).unwrap();
        folder.path(name)
    })
}

async fn systemd_analyze(arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new("systemd-analyze");
    // Colours are for terminals; no unit of this machine matters.
    command.args(arguments).env("SYSTEMD_COLORS", "0").env("SYSTEMD_PAGER", "").kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.unwrap();
    let output = output.expect("systemd-analyze is there; install it: apt-get install systemd");
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

#[tokio::test]
async fn the_units_are_understood_by_systemd_and_leave_little_exposed() {
    let folder = Folder::new();
    let [service, socket] = units(&folder);
    // A line that systemd does not know is a warning, and so is one that does nothing.
    let (_, said) = systemd_analyze(&["verify", "--man=no", &service, &socket]).await;
    assert_eq!(said, "");
    // From 0 to 100; that of a service that says nothing is 96.
    let (is_below, said) = systemd_analyze(&["security", "--offline=true", "--threshold=10", &service]).await;
    assert!(is_below, "{said}");
}
