//! The program itself: the demo, its exit codes, its signals.

use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::support::{App, TestServer, setting, soon, timed, tools};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_openclaw-mcp-proxy");

pub fn program(settings: &[(&str, &str)]) -> Command {
    program_by(Command::new(PROGRAM), settings)
}

/// The program, started by another one.
pub fn program_by(mut command: Command, settings: &[(&str, &str)]) -> Command {
    // A folder without a .env, and an environment without our settings.
    command.current_dir(env!("CARGO_TARGET_TMPDIR")).env_clear().kill_on_drop(true);
    for (name, value) in settings {
        command.env(setting(name), value);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn output(mut command: Command) -> Output {
    soon(command.output()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Starts the program and waits until it says where it listens.
pub async fn serving(settings: &[(&str, &str)]) -> (Child, String) {
    serve(program(settings)).await
}

/// Starts a command that is the program in the end.
pub async fn serve(mut command: Command) -> (Child, String) {
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let url = loop {
        let line = soon(lines.next_line()).await.unwrap().expect("the program says that it listens");
        if let Some((_, rest)) = line.split_once("url=") {
            break rest.split(' ').next().unwrap().to_owned();
        }
    };
    // What it logs from now on is read, so that it never has to wait.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (child, url)
}

/// What a program that runs has logged.
pub struct Log {
    lines: tokio::sync::mpsc::UnboundedReceiver<String>,
    pub seen: String,
}

impl Log {
    pub fn of(child: &mut Child) -> Self {
        let mut read = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, lines) = tokio::sync::mpsc::unbounded_channel();
        // Read to its end, so that the program never has to wait.
        tokio::spawn(async move {
            while let Ok(Some(line)) = read.next_line().await {
                let _gone = sender.send(line);
            }
        });
        Log { lines, seen: String::new() }
    }

    /// Waits for a line that holds this.
    pub async fn until(&mut self, text: &str) -> String {
        loop {
            let line = soon(self.lines.recv()).await.unwrap_or_else(|| panic!("no {text}: {}", self.seen));
            self.seen.push_str(&line);
            self.seen.push('\n');
            if line.contains(text) {
                return line;
            }
        }
    }
}

#[tokio::test]
async fn the_demo_prints_what_came_back_as_its_last_line() {
    for tokens in [&[][..], &[("APP_TOKEN", "a-token"), ("OPENCLAW_TOKEN", "another")]] {
        let mut demo = program(&[&[("LISTEN", "127.0.0.1:0")], tokens].concat());
        demo.args(["demo", "--once"]);
        let output = output(demo).await;
        assert!(output.status.success(), "{}", text(&output.stderr));
        let stdout = text(&output.stdout);
        assert_eq!(stdout.lines().last(), Some(r#"{"echoed_text":"Hello from an app behind NAT"}"#), "{stdout}");
        assert!(stdout.contains("http://127.0.0.1:") && stdout.contains("tools/list"));
    }
}

#[tokio::test]
async fn a_bad_setting_is_one_sentence_and_an_exit_code() {
    for (settings, says) in [
        (&[("MAX_TOOLS", "many")][..], "OPENCLAW_PROXY_MAX_TOOLS"),
        (&[("LISTEN", "0.0.0.0:0")], "OPENCLAW_PROXY_APP_TOKEN is empty"),
        (&[("LISTEN", "0.0.0.0:0"), ("APP_TOKEN", "canary-secret")], "OPENCLAW_PROXY_OPENCLAW_TOKEN is empty"),
        (&[("LOG", "=nonsense=")], "OPENCLAW_PROXY_LOG"),
        (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318")], "http://host:4318"),
        (&[("LISTEN", "192.0.2.1:9")], "cannot listen on 192.0.2.1:9"),
    ] {
        let settings: Vec<_> = settings
            .iter()
            .copied()
            .chain([("ALLOW_OPEN", if says.contains("cannot") { "true" } else { "" })])
            .collect();
        let output = output(program(&settings)).await;
        // A setting that cannot be right will not be; an address may become free.
        let code = if says.contains("cannot listen") { 1 } else { 78 };
        assert_eq!(output.status.code(), Some(code), "{says}");
        let stderr = text(&output.stderr);
        let last = stderr.lines().last().unwrap();
        assert!(last.starts_with("openclaw-mcp-proxy: ") && last.contains(says), "{stderr}");
        assert!(!stderr.contains("canary-secret") && !stderr.contains("panicked"), "{stderr}");
    }
}

#[tokio::test]
async fn the_exit_code_counts_though_nobody_reads_why() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = program(&[("MAX_TOOLS", "many")]);
    command.stderr(writer);
    assert_eq!(soon(command.status()).await.unwrap().code(), Some(78));
}

#[tokio::test]
async fn settings_are_read_from_a_dot_env_file_beneath_the_environment() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("dot-env-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join(".env"), "OPENCLAW_PROXY_LISTEN=127.0.0.1:0\nOPENCLAW_PROXY_MAX_TOOLS=many\n").unwrap();
    let mut with_file = program(&[]);
    with_file.current_dir(&dir);
    assert!(text(&output(with_file).await.stderr).contains("OPENCLAW_PROXY_MAX_TOOLS"));
    let mut overridden = program(&[("MAX_TOOLS", "5")]);
    overridden.current_dir(&dir).args(["demo", "--once"]);
    assert!(output(overridden).await.status.success());
    std::fs::write(dir.join(".env"), "OPENCLAW_PROXY_APP_TOKEN canary\n").unwrap();
    let mut broken = program(&[]);
    broken.current_dir(&dir);
    let stderr = text(&output(broken).await.stderr);
    assert!(stderr.contains(".env has a line") && !stderr.contains("canary"), "{stderr}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[tokio::test]
async fn the_program_asks_another_one_whether_it_is_well() {
    let (mut child, url) = serving(&[("LISTEN", "127.0.0.1:0"), ("MAX_TOOLS", "5")]).await;
    let address = url.strip_prefix("http://").unwrap();
    let port = address.rsplit(':').next().unwrap();
    for listen in [address.to_owned(), format!("0.0.0.0:{port}")] {
        let mut health = program(&[("LISTEN", &listen), ("ALLOW_OPEN", "true")]);
        health.arg("health");
        // It touches nothing: whoever asks may be somebody else than whom the file is to belong to.
        let audit = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("health-{}", uuid::Uuid::new_v4()));
        health.env("OPENCLAW_PROXY_AUDIT_FILE", &audit);
        assert_eq!(output(health).await.status.code(), Some(0), "{listen}");
        assert!(!audit.exists());
    }
    child.kill().await.unwrap();
    let mut health = program(&[("LISTEN", address)]);
    health.arg("health");
    assert_eq!(output(health).await.status.code(), Some(1));
}

#[cfg(unix)]
#[tokio::test]
async fn sigterm_stops_it_and_a_second_one_at_once() {
    let (mut child, _) = serving(&[("LISTEN", "127.0.0.1:0")]).await;
    signal(&child, "TERM").await;
    assert!(soon(child.wait()).await.unwrap().success());

    let (mut child, url) = serving(&[("LISTEN", "127.0.0.1:0")]).await;
    let port = url.rsplit(':').next().unwrap().parse().unwrap();
    let app = App::register_at(&url, json!({ "device_id": "d", "tools": tools(&["slow"]) })).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "slow", "{}");
    bridge.invoked().await;
    signal(&child, "TERM").await;
    crate::support::until(async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err()).await;
    assert!(child.try_wait().unwrap().is_none(), "it waits for the call");
    signal(&child, "TERM").await;
    let (status, took) = timed(child.wait()).await;
    assert_eq!(status.unwrap().code(), Some(130));
    assert!(took < Duration::from_secs(2), "{took:?}");
    call.abort();
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn sighup_does_not_end_it_however_early_it_comes() {
    // Reading this takes a while.
    let tenants: String = (0..20_000).map(|n| format!("[[tenant]]\nname = \"{n}\"\n")).collect();
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("early-{}", uuid::Uuid::new_v4()));
    std::fs::write(&file, tenants).unwrap();
    let settings = [("LISTEN", "127.0.0.1:0"), ("LOG", "info"), ("TENANTS_FILE", file.to_str().unwrap())];
    let mut child = program(&settings).spawn().unwrap();
    let pid = child.id().unwrap();
    // As soon as the signal is caught, which /proc shows; before, nobody can be asked to survive it.
    let is_caught = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(mask, 16).unwrap() & 1 != 0
    };
    let mut log = Log::of(&mut child);
    crate::support::until(async || is_caught()).await;
    signal(&child, "HUP").await;
    assert!(log.lines.try_recv().is_err(), "it is caught only when all is read");
    log.until("The file of tenants is read again").await;
    signal(&child, "TERM").await;
    assert!(soon(child.wait()).await.unwrap().success(), "{}", log.seen);
    std::fs::remove_file(file).unwrap();
}

#[tokio::test]
async fn an_environment_that_is_not_utf_8_is_no_matter_unless_it_is_ours() {
    #[cfg(unix)]
    let odd = <std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(vec![0xff]);
    #[cfg(windows)]
    let odd = <std::ffi::OsString as std::os::windows::ffi::OsStringExt>::from_wide(&[0xd800]);
    let mut demo = program(&[("LISTEN", "127.0.0.1:0")]);
    demo.env("X", &odd).args(["demo", "--once"]);
    assert!(output(demo).await.status.success());
    let mut ours = program(&[]);
    ours.env("OPENCLAW_PROXY_APP_TOKEN", odd);
    assert_eq!(output(ours).await.status.code(), Some(78));
}

#[cfg(unix)]
async fn signal(child: &Child, name: &str) {
    let pid = child.id().unwrap().to_string();
    assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().await.unwrap().success());
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn no_log_line_holds_a_token_an_argument_or_a_result() {
    let settings =
        [("LISTEN", "127.0.0.1:0"), ("LOG", "trace"), ("APP_TOKEN", "canary-app"), ("OPENCLAW_TOKEN", "canary-claw")];
    for format in ["human", "json"] {
        let mut child = program(&[&settings[..], &[("LOG_FORMAT", format)]].concat()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut url = String::new();
        let log = tokio::spawn(async move {
            let mut log = String::new();
            while let Ok(Some(line)) = lines.next_line().await {
                log.push_str(&line);
                log.push('\n');
            }
            log
        });
        // The port is found from outside, for the log belongs to the task above.
        let pid = child.id().unwrap();
        crate::support::until(async || listening_port(pid).is_some()).await;
        url.push_str(&format!("http://127.0.0.1:{}", listening_port(pid).unwrap()));
        let registration = json!({ "device_id": "x\n2026 ERROR forged \u{1b}[2J", "tools": tools(&["echo"]) });
        let app = App::register_at_as(&url, registration, "canary-app").await;
        let mut bridge = app.connect().await;
        let client = app.client().header("authorization", "Bearer canary-claw");
        let call = client.spawn_call("1", "echo", r#"{"x":"canary-argument"}"#);
        bridge.answer_next(r#""ok":true,"content":"canary-result""#).await;
        assert!(call.await.unwrap().text.contains("canary-result"));
        let wrong = client.clone().header("authorization", "Bearer canary-wrong");
        wrong.rpc("1", "ping", r#"{"x":"canary-argument"}"#).await;
        bridge.send_text(r#"{"type":"canary-frame"}"#).await;
        drop(bridge);
        app.wait_connected(false).await;
        child.kill().await.unwrap();
        let log = log.await.unwrap();
        assert!(log.contains("session registered") && log.contains("bridge connected"), "{log}");
        assert!(!log.contains("canary"), "{}", log.lines().find(|line| line.contains("canary")).unwrap_or_default());
        assert!(!log.contains('\u{1b}') && !log.lines().any(|line| line.starts_with("2026 ERROR")), "{log}");
    }
}

/// The port on which a process listens, from /proc.
#[cfg(target_os = "linux")]
fn listening_port(pid: u32) -> Option<u16> {
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .ok()?
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned))
        .collect();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).ok()?;
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let listens = columns[3] == "0A" && sockets.iter().any(|inode| inode == columns[9]);
        listens.then(|| u16::from_str_radix(columns[1].split(':').nth(1)?, 16).ok()).flatten()
    })
}

#[tokio::test]
async fn the_demo_finds_a_port_if_the_default_one_is_taken() {
    // Whoever has the default port, this test or another program, it is taken.
    let _taken = tokio::net::TcpListener::bind("127.0.0.1:8000").await;
    let mut demo = program(&[]);
    demo.args(["demo", "--once"]);
    let output = output(demo).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).contains("127.0.0.1:8000/"));
    let mut serve = program(&[]);
    serve.arg("serve");
    let refused = self::output(serve).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("OPENCLAW_PROXY_LISTEN"));
    drop(TestServer::start(&[]).await);
}

#[cfg(unix)]
#[tokio::test]
async fn shells_complete_commands_and_flags() {
    let node = env!("CARGO_BIN_EXE_openclaw-node");
    for (path, name, words, expected) in [
        (PROGRAM, "openclaw-mcp-proxy", "doctor --app", "--app-token-file"),
        (PROGRAM, "openclaw-mcp-proxy", "check", "check-config"),
        (node, "openclaw-node", "serve --can", "--canvas-private-network"),
    ] {
        let script = r#"
            source <("$0" completions bash)
            COMP_WORDS=("$1" $2)
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            function=$(complete -p "$1" | grep -oP '(?<=-F )\S+')
            "$function" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            echo "${COMPREPLY[*]}"
        "#;
        let mut bash = Command::new("bash");
        bash.args(["-c", script, path, name, words]).stdin(Stdio::null());
        let completed = text(&output(bash).await.stdout);
        assert!(completed.split_whitespace().any(|word| word == expected), "{words}: {completed}");
        for shell in ["zsh", "fish", "powershell"] {
            let mut command = Command::new(path);
            command.args(["completions", shell]);
            let script = text(&output(command).await.stdout);
            assert!(script.contains(name) && script.contains(words.split(' ').next().unwrap()), "{shell}: {script}");
        }
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_reader_that_has_seen_enough_is_no_crash() {
    for arguments in ["completions bash", "check-config", "token"] {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{PROGRAM} {arguments} | true")]).env_remove("OPENCLAW_PROXY_LISTEN");
        let stderr = text(&output(shell).await.stderr);
        assert!(!stderr.contains("panicked"), "{arguments}: {stderr}");
    }
}
