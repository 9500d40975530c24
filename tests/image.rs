//! The container image: the Dockerfile as it is, its image as a container that may do nothing, and as Compose runs it
//! behind Caddy.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::process::Command;

use crate::clients::clients_dir;
use crate::program::PROGRAM;
use crate::support::{App, http, timed, tools, until};

/// What a build is told, and the part of it that --version shows.
const COMMIT: &str = "0123456789abcdef";
const SHOWN_COMMIT: &str = "(0123456789ab)";

/// Everything is compiled, and the machine may be busy.
const BUILD_PATIENCE: Duration = Duration::from_secs(1800);

/// Where an image is built and run; both go with it.
struct Store(PathBuf);

impl Drop for Store {
    fn drop(&mut self) {
        let mut remove = std::process::Command::new(self.0.join("podman"));
        let _none = remove.args(["rm", "--force", "--all", "--time", "0"]).stderr(Stdio::null()).output();
        let _left_behind = std::fs::remove_dir_all(&self.0);
    }
}

impl Store {
    async fn build() -> Self {
        // podman wants a short path.
        let name = format!("ocp-{}", &uuid::Uuid::new_v4().simple().to_string()[..12]);
        let store = Store(std::env::temp_dir().join(name));
        // Whatever it starts ends with it.
        let mut build = unshare(&["--pid", "--mount"], "image.sh");
        build.arg(&store.0).arg(COMMIT);
        said(tokio::time::timeout(BUILD_PATIENCE, build.output()).await.unwrap().unwrap());
        store
    }

    /// What the doctor says of the sample for Compose, which was brought up and is down again.
    async fn composed(&self) -> Value {
        let mut command = unshare(&["--pid", "--mount", "--net"], "compose.sh");
        command.arg(&self.0).arg(clients_dir().join("compose/bin/docker-compose")).arg(PROGRAM);
        let report = said(tokio::time::timeout(BUILD_PATIENCE, command.output()).await.unwrap().unwrap());
        serde_json::from_str(&report).unwrap()
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(self.0.join("podman"));
        command.args(arguments.split(' ')).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("OPENCLAW_PROXY_APP_TOKEN", "app-token").env("OPENCLAW_PROXY_OPENCLAW_TOKEN", "claw-token");
        command.kill_on_drop(true);
        command
    }

    async fn podman(&self, arguments: &str) -> String {
        said(tokio::time::timeout(BUILD_PATIENCE, self.command(arguments).output()).await.unwrap().unwrap())
    }
}

/// A script of this folder in namespaces of its own.
fn unshare(namespaces: &[&str], script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(namespaces).args(["--fork", "--mount-proc", "--kill-child"]);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script));
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

#[track_caller]
fn said(output: Output) -> String {
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{}: {stdout}{stderr}", output.status);
    stdout.trim().to_owned()
}

/// The files that a build reads, from the folder of the package.
fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join("src")];
    let mut sources = vec![root.join("Cargo.toml"), root.join("Cargo.lock")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let included = text.split(r#"include_str!(""#).skip(1).filter_map(|rest| rest.split_once('"'));
            sources.extend(included.map(|(name, _)| path.with_file_name(name)));
            sources.push(path);
        }
    }
    sources.iter().map(|path| path.strip_prefix(root).unwrap().to_owned()).collect()
}

#[tokio::test]
#[ignore = "it builds an image with podman; tests/run --heavy runs it"]
async fn the_dockerfile_builds_an_image_that_serves_as_nobody_and_behind_caddy() {
    assert_eq!(std::fs::metadata("/proc/self").unwrap().uid(), 0, "this test makes containers: run it as root");
    let store = Store::build().await;
    copies_sources_alone(&store);
    serves_as_nobody(&store).await;
    let report = store.composed().await;
    let checks = report["checks"].as_object().unwrap();
    let odd: Vec<_> = checks.iter().filter(|(_, check)| check["state"] != "ok").map(|(name, _)| name).collect();
    // Caddy's own certificates live for half a day.
    assert!(checks.len() > 30 && odd == ["tls"] && checks["tls"]["state"] == "warning", "{report}");
}

fn copies_sources_alone(store: &Store) {
    let copied = |file: &Path| store.0.join("sources").join(file).exists();
    let sources = sources();
    assert!(sources.len() > 100, "{sources:?}");
    assert!(sources.iter().all(|file| copied(file)), "the build would miss a file");
    for stray in [".env", "deploy", "target", "fuzz", ".git"] {
        assert!(!copied(Path::new(stray)), "{stray} is in the image's build");
    }
}

async fn serves_as_nobody(store: &Store) {
    let image: Value = serde_json::from_str(&store.podman("image inspect openclaw-mcp-proxy").await).unwrap();
    assert_eq!(image[0]["Config"]["User"], "65532:65532", "{image}");
    assert_eq!(image[0]["Config"]["StopSignal"], "SIGTERM");

    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    // As compose.yaml has it, but on the network of this machine, and with limits that any user may set.
    let started = format!(
        "run --detach --name proxy --pull=never --network=host --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 \
         --read-only --cap-drop all --security-opt no-new-privileges --health-interval disable \
         --env OPENCLAW_PROXY_APP_TOKEN --env OPENCLAW_PROXY_OPENCLAW_TOKEN \
         --env OPENCLAW_PROXY_LISTEN=127.0.0.1:{port} openclaw-mcp-proxy"
    );
    store.podman(&started).await;
    let base = format!("http://127.0.0.1:{port}");
    until(async || http().get(format!("{base}/health")).send().await.is_ok_and(|reply| reply.status() == 200)).await;

    let pid = store.podman("inspect proxy --format {{.State.Pid}}").await;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in ["Uid:\t65532\t65532\t65532\t65532", "CapEff:\t0000000000000000", "NoNewPrivs:\t1"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    // What it calls itself: the container's health, as the image says to find out.
    store.podman("healthcheck run proxy").await;

    // A tool is called in it, by the stdio program that is in it, too.
    let app = App::register_at_as(&base, json!({ "device_id": "d", "tools": tools(&["echo"]) }), "app-token").await;
    let echo = app.connect().await.echo();
    let exec = format!(
        "exec --interactive --env OPENCLAW_PROXY_SERVER_URL={base} --env OPENCLAW_PROXY_SESSION_ID={} proxy \
         /usr/local/bin/openclaw-mcp-stdio",
        app.id
    );
    let mut shim = store.command(&exec).stdin(Stdio::piped()).spawn().unwrap();
    let call = json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": { "name": "echo", "arguments": { "x": "y" } } });
    shim.stdin.take().unwrap().write_all(format!("{call}\n").as_bytes()).await.unwrap();
    let answer = said(tokio::time::timeout(BUILD_PATIENCE, shim.wait_with_output()).await.unwrap().unwrap());
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert!(
        answer["id"] == 7 && answer["result"]["content"][0]["text"].as_str().unwrap().contains("\"y\""),
        "{answer}"
    );
    for program in ["openclaw-mcp-proxy", "openclaw-mcp-stdio", "openclaw-node", "winnode"] {
        let version = store.podman(&format!("exec proxy /usr/local/bin/{program} --version")).await;
        assert!(version.starts_with(program) && version.ends_with(SHOWN_COMMIT), "{version}");
    }
    echo.abort();

    // It hears that it should stop, and does so by itself.
    let (_, took) = timed(store.podman("stop --time 40 proxy")).await;
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert_eq!(store.podman("inspect proxy --format {{.State.ExitCode}}").await, "0");
}
