//! What keeps the proxy from starting: one sentence with what mends it, or with check-config all of them at once.

use std::path::PathBuf;
use std::process::Output;

use tokio::net::TcpListener;
use tokio::process::Command;

use crate::program::{PROGRAM, program_by, serving};
use crate::support::soon;

/// A folder for one test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("start-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
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

/// Runs the program, without the privileges that root has.
async fn run(arguments: &[&str], settings: &[(&str, &str)]) -> (i32, String, String) {
    let mut command = program_by(Command::new("unshare"), settings);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    // In a network of its own the lowest ports are privileged, whatever this machine says of them.
    let is_privileged = settings.contains(&("LISTEN", "0.0.0.0:80"));
    command.args(is_privileged.then_some("--net"));
    command.args(["setpriv", "--bounding-set=-all", "--inh-caps=-all", PROGRAM]).args(arguments);
    let Output { status, stdout, stderr } = soon(command.output()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

#[tokio::test]
async fn whatever_keeps_it_from_starting_is_one_sentence_with_what_mends_it() {
    let folder = Folder::new();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    // Belongs to somebody else, and is for him alone.
    let foreign = folder.file("foreign.toml", "");
    std::os::unix::fs::chown(&foreign, Some(65534), None).unwrap();
    std::fs::set_permissions(&foreign, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let malformed = folder.file("malformed.toml", "[[tenant]]\nname = \"canary name\"\n");
    let nowhere = folder.path("nowhere/audit");
    let pipe = folder.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().await.unwrap().success());
    for (settings, code, says, mends) in [
        (&[("LISTEN", &*taken)][..], 1, "another program does", "set OPENCLAW_PROXY_LISTEN to another port"),
        (&[("LISTEN", "192.0.2.1:9"), ("ALLOW_OPEN", "true")], 1, "no such address", "to 127.0.0.1 behind"),
        (&[("LISTEN", "0.0.0.0:80"), ("ALLOW_OPEN", "true")], 1, "ports below 1024", "CAP_NET_BIND_SERVICE"),
        (&[("LISTEN", "localhost")], 78, "OPENCLAW_PROXY_LISTEN", "such as 127.0.0.1:8000"),
        (&[("LISTEN", "0.0.0.0:0")], 78, "OPENCLAW_PROXY_APP_TOKEN is empty", "set the token"),
        (&[("APP_TOKEN", "${canary}")], 78, "was not expanded", "write its value"),
        (&[("MAX_TOOLS", "many")], 78, "OPENCLAW_PROXY_MAX_TOOLS", ".env.example shows"),
        (&[("MAX_RESULT_BYTES", "99999999999")], 78, "more than OPENCLAW_PROXY_MAX_BRIDGE", "lower the one"),
        (&[("TENANTS_FILE", "/nonexistent")], 78, "/nonexistent cannot be read", "correct OPENCLAW_PROXY_TENANTS_FILE"),
        (&[("TENANTS_FILE", &foreign)], 78, "Permission denied", "make it readable for the user"),
        (&[("TENANTS_FILE", &malformed)], 78, "unusable name", "it must have 1 to 64"),
        (&[("AUDIT_FILE", &nowhere)], 78, "OPENCLAW_PROXY_AUDIT_FILE cannot be written", "make its folder"),
        (&[("STATE_FILE", &nowhere)], 78, "The state file", "see OPENCLAW_PROXY_STATE_FILE"),
        (&[("STATE_FILE", &pipe)], 78, "it is no regular file", "see OPENCLAW_PROXY_STATE_FILE"),
        (
            &[("ADMIN_LISTEN", "192.0.2.1:9"), ("ADMIN_TOKEN", "0123456789abcdef")],
            1,
            "for the operator",
            "set OPENCLAW_PROXY_ADMIN_LISTEN",
        ),
        (&[("LOG", "=nonsense=")], 78, "OPENCLAW_PROXY_LOG", "a level such as info"),
    ] {
        let (exit, stdout, stderr) = run(&[], settings).await;
        assert_eq!((exit, &*stdout), (code, ""), "{settings:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.starts_with("openclaw-mcp-proxy: ") && stderr.ends_with(".\n"), "{stderr}");
        assert!(stderr.contains(says) && stderr.contains(mends) && !stderr.contains("canary"), "{stderr}");
        // A taken port is no problem for a check, for the proxy itself may have it; all others are.
        let (exit, stdout, _) = run(&["check-config"], settings).await;
        assert_eq!(exit, if says.contains("another program") { 0 } else { 78 }, "{stdout}");
        assert!(stdout.contains(says) && stdout.contains(mends), "{stdout}");
    }
}

#[tokio::test]
async fn check_config_says_all_that_is_wrong_at_once() {
    let folder = Folder::new();
    let nowhere = folder.path("nowhere/audit");
    let settings = [
        ("LISTEN", "192.0.2.1:9"),
        ("APP_TOKEN", "canary space"),
        ("MAX_TOOLS", "many"),
        ("SESSION_TTL_SECONDS", "0"),
        ("ALLOWED_ORIGINS", "example.com"),
        ("TENANTS_FILE", "/nonexistent"),
        ("AUDIT_FILE", &nowhere),
        ("LOG", "=nonsense="),
    ];
    let (code, stdout, stderr) = run(&["check-config"], &settings).await;
    assert_eq!((code, &*stderr), (78, ""), "{stdout}");
    let problems: Vec<&str> = stdout.lines().filter(|line| line.starts_with("problem: ")).collect();
    for says in
        ["192.0.2.1", "APP_TOKEN", "MAX_TOOLS", "SESSION_TTL", "example.com", "/nonexistent", "nowhere", "_LOG "]
    {
        assert!(problems.iter().any(|problem| problem.contains(says)), "{says}: {stdout}");
    }
    assert!(!stdout.contains("canary") && stdout.ends_with("The proxy would not start.\n"), "{stdout}");
}

#[tokio::test]
async fn check_config_shows_what_is_not_as_usual_and_touches_nothing() {
    let folder = Folder::new();
    let audit = folder.path("audit");
    let settings = [
        ("LISTEN", "127.0.0.1:0"),
        ("APP_TOKEN", "canary-1-0123456789"),
        ("OPENCLAW_TOKEN", "canary-2-0123456789"),
        ("MAX_TOOLS", "512"),
        ("TOOL_TIMEOUT_SECONDS", "60"),
        ("TOOL_TIMOUT_SECONDS", "60"),
        ("QQQ", "1"),
        ("AUDIT_FILE", &audit),
    ];
    let (code, stdout, _) = run(&["check-config"], &settings).await;
    assert_eq!(code, 0, "{stdout}");
    for line in [
        "OPENCLAW_PROXY_APP_TOKEN=(set)",
        "OPENCLAW_PROXY_OPENCLAW_TOKEN=(set)",
        "OPENCLAW_PROXY_TOOL_TIMEOUT_SECONDS=60",
        "OPENCLAW_PROXY_LISTEN=127.0.0.1:0",
        "warning: OPENCLAW_PROXY_TOOL_TIMOUT_SECONDS is set, but there is no such setting; OPENCLAW_PROXY_TOOL_TIMEOUT_SECONDS is meant, most likely.",
        "warning: OPENCLAW_PROXY_QQQ is set, but there is no such setting; remove it.",
        "The proxy would start.",
    ] {
        assert!(stdout.lines().any(|shown| shown == line), "{line}: {stdout}");
    }
    assert!(!stdout.contains("canary") && !stdout.contains("MAX_TOOLS=") && !stdout.contains("problem"), "{stdout}");
    assert!(!std::fs::exists(&audit).unwrap(), "the file is for the proxy to make, as its own user");
    // And it does start.
    let (mut child, _) = serving(&settings).await;
    child.kill().await.unwrap();
    assert!(std::fs::exists(&audit).unwrap());
    assert_eq!(run(&["check-config"], &settings).await.0, 0);
}

#[tokio::test]
async fn check_config_reads_the_dot_env_file() {
    let folder = Folder::new();
    folder.file(".env", "OPENCLAW_PROXY_LISTEN=127.0.0.1:0\nOPENCLAW_PROXY_MAX_CALLS=0\n");
    let mut command = program_by(Command::new(PROGRAM), &[]);
    command.current_dir(&folder.0).arg("check-config");
    let output = soon(command.output()).await.unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(String::from_utf8(output.stdout).unwrap().contains("problem: OPENCLAW_PROXY_MAX_CALLS is 0"));
    folder.file(".env", "OPENCLAW_PROXY_APP_TOKEN canary\n");
    let mut command = program_by(Command::new(PROGRAM), &[]);
    command.current_dir(&folder.0).arg("check-config");
    let stdout = String::from_utf8(soon(command.output()).await.unwrap().stdout).unwrap();
    assert!(stdout.contains("problem: .env has a line") && !stdout.contains("canary"), "{stdout}");
}
