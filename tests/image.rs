//! The container image: the last stage of the Dockerfile, as a container that may do nothing.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::process::Command;

use crate::support::{App, http, timed, tools, until};

/// All that the package builds.
const PROGRAMS: [&str; 4] = [
    env!("CARGO_BIN_EXE_openclaw-mcp-proxy"),
    env!("CARGO_BIN_EXE_openclaw-mcp-stdio"),
    env!("CARGO_BIN_EXE_openclaw-node"),
    env!("CARGO_BIN_EXE_winnode"),
];

/// Images are copied as a whole, and the machine may be busy.
const BUILD_PATIENCE: Duration = Duration::from_secs(300);

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
        let mut build = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/image.sh"));
        build.arg(&store.0).args(PROGRAMS).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(BUILD_PATIENCE, build.output()).await.unwrap().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        store
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

fn said(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
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
async fn the_image_serves_as_nobody_and_holds_all_programs() {
    let store = Store::build().await;
    let copied = |file: &Path| store.0.join("src").join(file).exists();
    let sources = sources();
    assert!(sources.len() > 100, "{sources:?}");
    assert!(sources.iter().all(|file| copied(file)), "the build would miss a file");
    for stray in [".env", "deploy", "target", "fuzz", ".git"] {
        assert!(!copied(Path::new(stray)), "{stray} is in the image's build");
    }
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
    for asked in ["openclaw-node --version", "winnode --help"] {
        store.podman(&format!("exec proxy /usr/local/bin/{asked}")).await;
    }
    echo.abort();

    // It hears that it should stop, and does so by itself.
    let (_, took) = timed(store.podman("stop --time 40 proxy")).await;
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert_eq!(store.podman("inspect proxy --format {{.State.ExitCode}}").await, "0");
}
