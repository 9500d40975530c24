//! Running programs for a client, as far as the owner permits it: the real server, the real program for the owner.

use std::path::PathBuf;
use std::process::Stdio;

use openclaw_mcp_proxy::node::approvals::location::{FILE_NAME, Location};
use openclaw_mcp_proxy::node::capabilities::Exposure;
use openclaw_mcp_proxy::node::capabilities::exec::{Exec, Options};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::local_mcp::Local;
use crate::support::{McpClient, random, soon, until};

const REFUSED: &str = "exec-approvals-v2: UserDenied (user-denied)";

/// A node with a folder of data of its own.
struct Node {
    local: Local,
    data: PathBuf,
}

impl Node {
    async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    async fn start_with(options: Options) -> Self {
        let name = format!("exec-{}-{}", std::process::id(), (random() * 1e9) as u64);
        let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&data).unwrap();
        let local = Local::start().await;
        local.registry.add(Exec::new(Location::in_folder(&data), options), Exposure::Everywhere);
        Node { local, data }
    }

    fn client(&self) -> McpClient {
        McpClient::new(&self.local.url)
    }

    fn policy(&self) -> PathBuf {
        self.data.join(FILE_NAME)
    }

    /// A call: its payload, or the text of its error.
    async fn call(&self, tool: &str, args: Value) -> Result<Value, String> {
        let reply = self.client().call(tool, &args.to_string()).await;
        let text = reply.tool_text();
        if reply.is_tool_error() { Err(text) } else { Ok(serde_json::from_str(&text).unwrap()) }
    }

    async fn run(&self, command: &[&str]) -> Result<Value, String> {
        self.call("system.run", json!({ "command": command })).await
    }

    fn owner(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_openclaw-node"));
        command.arg("approvals").args(args).env_remove("OPENCLAW_STATE_DIR").env("OPENCLAW_TRAY_DATA_DIR", &self.data);
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// What the owner's program says, if it ends with this code.
    async fn approvals(&self, args: &[&str], code: i32) -> String {
        said(self.owner(args), code).await
    }

    /// Permits everything.
    async fn open(&self) {
        self.approvals(&["set", "--security", "full"], 0).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.data).unwrap();
    }
}

/// All that a program prints.
async fn said(mut command: Command, code: i32) -> String {
    let output = soon(command.output()).await.unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}

/// Whether a process is still there, and no zombie.
fn is_alive(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test]
async fn a_command_runs_as_long_as_the_owner_lists_it() {
    let node = Node::start().await;
    let echo = &["echo", "it", "runs"][..];
    assert_eq!(node.run(echo).await, Err(REFUSED.to_owned()));
    assert!(node.approvals(&["check", "--", "echo", "it"], 1).await.contains(REFUSED));
    let listed = node.approvals(&["allow", "echo"], 0).await;
    assert!(listed.contains("listed commands run, and no others"), "{listed}");
    assert_eq!(node.run(echo).await.unwrap()["stdout"], "it runs");
    assert_eq!(node.run(&["env", "echo", "it"]).await.unwrap()["stdout"], "it");
    assert_eq!(node.run(&["false"]).await, Err(REFUSED.to_owned()));
    assert_eq!(node.run(&["sh", "-c", "echo it"]).await, Err(REFUSED.to_owned()));
    node.approvals(&["check", "--", "echo", "it"], 0).await;
    node.approvals(&["revoke", "echo"], 0).await;
    assert_eq!(node.run(echo).await, Err(REFUSED.to_owned()));
    assert!(node.approvals(&["revoke", "echo"], 1).await.contains("not listed"));
}

#[tokio::test]
async fn a_command_can_be_bound_to_its_arguments_and_to_an_agent() {
    let node = Node::start().await;
    node.approvals(&["allow", "python3", "--exact", "-c", "print('a b')"], 0).await;
    node.approvals(&["allow", "--agent", "other", "--args-regex", "a|b .*", "echo"], 0).await;
    assert_eq!(node.run(&["python3", "-c", "print('a b')"]).await.unwrap()["stdout"], "a b");
    for other in [&["python3", "-c", "print('c')"][..], &["python3"], &["python3", "-c", "print('a", "b')"]] {
        assert_eq!(node.run(other).await, Err(REFUSED.to_owned()), "{other:?}");
    }
    let as_other = async |words: &[&str]| {
        let args = json!({ "command": words, "agentId": "other" });
        node.call("system.run", args).await.is_ok()
    };
    assert!(as_other(&["echo", "a"]).await && as_other(&["echo", "b", "c"]).await);
    assert!(!as_other(&["echo", "x", "a"]).await && !as_other(&["echo"]).await);
    assert!(node.run(&["echo", "a"]).await.is_err());
    for (args, says) in [
        (&["allow", "sh"][..], "is never listed"),
        (&["allow", env!("CARGO_BIN_EXE_openclaw-node"), "--exact"], "is never listed"),
        (&["allow", "python3"], "--exact or --args-regex"),
        (&["allow", "no-such-program"], "not found on PATH"),
        (&["allow", "ec*"], "names no folder"),
        (&["allow", "--args-regex", "(", "echo"], "--args-regex cannot be used"),
        (&["allow", "/x/y.cmd"], "batch file"),
    ] {
        assert!(node.approvals(args, 1).await.contains(says), "{args:?}");
    }
    let table = node.approvals(&["list"], 0).await;
    assert!(table.contains("exactly -c \"print('a b')\"") && table.contains("like ^(?:a|b .*)$"), "{table}");
    let listed: Value = serde_json::from_str(&node.approvals(&["list", "--json"], 0).await).unwrap();
    let entry = &listed["file"]["agents"]["other"]["allowlist"][0];
    node.approvals(&["revoke", &entry["id"].as_str().unwrap()[..8]], 0).await;
    assert!(!as_other(&["echo", "a"]).await);
}

#[tokio::test]
async fn the_owner_says_what_is_in_force() {
    let node = Node::start().await;
    node.approvals(&["allow", "echo"], 0).await;
    for (args, says, listed_runs, other_runs) in [
        (&["--ask", "always"][..], "nothing runs", false, false),
        (&["--ask-fallback", "allowlist"], "listed commands run", true, false),
        (&["--security", "full"], "listed commands run", true, false),
        (&["--ask-fallback", "full"], "every command runs", true, true),
        (&["--agent", "main", "--security", "deny"], "nothing runs", false, false),
        (&["--agent", "main", "--security", "full", "--ask", "off"], "every command runs", true, true),
    ] {
        let said = node.approvals(&[&["set"], args].concat(), 0).await;
        assert!(said.contains(says), "{said}");
        let runs = (node.run(&["echo"]).await.is_ok(), node.run(&["true"]).await.is_ok());
        assert_eq!(runs, (listed_runs, other_runs), "{args:?}");
    }
    node.approvals(&["set"], 2).await;
    node.approvals(&["set", "--security", "everything"], 2).await;
    node.approvals(&["set", "--agent", "main", "--security", "deny"], 0).await;
    assert!(node.approvals(&["allow", "true"], 1).await.contains("approvals set --security allowlist"));
}

#[tokio::test]
async fn what_a_program_started_ends_with_its_time_and_with_its_call() {
    let node = Node::start().await;
    node.open().await;
    let script = |file: &str| format!("sleep 1000 & echo $! > '{}'; wait", node.data.join(file).display());
    let pid = async |file: &str| {
        let path = node.data.join(file);
        until(async || std::fs::read_to_string(&path).is_ok_and(|text| text.ends_with('\n'))).await;
        std::fs::read_to_string(&path).unwrap().trim().to_owned()
    };
    let args = json!({ "command": ["sh", "-c", script("late")], "timeoutMs": 500 });
    let late = node.call("system.run", args).await.unwrap();
    assert_eq!(
        (&late["timedOut"], &late["exitCode"], &late["success"]),
        (&json!(true), &json!(-1), &json!(false)),
        "{late}"
    );
    let late = pid("late").await;
    until(async || !is_alive(&late)).await;

    let args = json!({ "command": ["sh", "-c", script("cancelled")] }).to_string();
    let call = node.client().spawn_call("\"c\"", "system.run", &args);
    let cancelled = pid("cancelled").await;
    assert!(is_alive(&cancelled));
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"c"}}"#;
    assert_eq!(node.client().post(cancel).await.status, 204);
    let reply = soon(call).await.unwrap();
    assert_eq!((reply.is_tool_error(), &*reply.tool_text()), (true, "cancelled"));
    until(async || !is_alive(&cancelled)).await;
}

#[tokio::test]
async fn a_client_can_only_make_the_policy_stricter() {
    let node = Node::start().await;
    node.approvals(&["allow", "echo"], 0).await;
    let get = async || node.call("system.execApprovals.get", json!({})).await.unwrap();
    let set = async |hash: &Value, file: &Value| {
        node.call("system.execApprovals.set", json!({ "baseHash": hash, "file": file })).await
    };
    let first = get().await;
    assert_eq!(first["path"], node.policy().display().to_string());
    let edited = |pointer: &str, value: Value| {
        let mut file = first["file"].clone();
        *file.pointer_mut(pointer).unwrap() = value;
        file
    };
    let cmd = json!([{ "pattern": "**/cmd.exe" }]);
    for (file, says) in [
        (edited("/defaults/security", json!("full")), "less restrictive"),
        (edited("/defaults/ask", json!("off")), "less restrictive"),
        (edited("/defaults/askFallback", json!("full")), "less restrictive"),
        (edited("/defaults/autoAllowSkills", json!(true)), "autoAllowSkills"),
        (edited("/agents/main/allowlist", cmd), "cannot add or change allowlist entries"),
        (edited("/agents/main/allowlist/0/pattern", json!("/**")), "cannot add or change allowlist entries"),
        (edited("/defaults/ask", json!(0)), "Invalid exec approvals file"),
    ] {
        let error = set(&first["hash"], &file).await.unwrap_err();
        assert!(error.contains(says), "{error}");
        assert_eq!(get().await, first, "nothing has changed");
    }
    let same = set(&first["hash"], &first["file"]).await.unwrap();
    let emptied = set(&same["hash"], &edited("/agents/main/allowlist", json!([]))).await.unwrap();
    assert_eq!(node.run(&["echo"]).await, Err(REFUSED.to_owned()));
    let error = set(&first["hash"], &first["file"]).await.unwrap_err();
    assert!(error.contains("changed; reload"), "{error}");
    let error = set(&emptied["hash"], &first["file"]).await.unwrap_err();
    assert!(error.contains("cannot add or change"), "what is gone does not come back: {error}");
}

#[tokio::test]
async fn a_malformed_policy_forbids_everything_and_is_left_as_it_is() {
    let node = Node::start().await;
    node.open().await;
    assert!(node.run(&["true"]).await.is_ok());
    for bad in ["", "{", r#"{"version":3}"#, r#"{"version":1,"defaults":{"security":"fully"}}"#] {
        std::fs::write(node.policy(), bad).unwrap();
        let denied = Err("exec-approvals-v2: SecurityDeny (security=deny)".to_owned());
        assert_eq!(node.run(&["true"]).await, denied);
        assert!(node.call("system.execApprovals.get", json!({})).await.is_err());
        let set = json!({ "baseHash": "x", "file": { "version": 1 } });
        assert!(node.call("system.execApprovals.set", set).await.is_err());
        for args in [&["list"][..], &["allow", "true"], &["set", "--security", "full"], &["revoke", "true"]] {
            assert!(node.approvals(args, 1).await.contains("not usable"), "{args:?}");
        }
        assert!(node.approvals(&["check", "--", "true"], 1).await.contains("not usable"));
        assert_eq!(std::fs::read_to_string(node.policy()).unwrap(), bad);
    }
}

#[tokio::test]
async fn the_owner_and_the_node_lose_nothing_of_each_others() {
    let node = Node::start().await;
    node.approvals(&["allow", "true"], 0).await;
    // Each is said twice at once.
    let say = |n: u8| tokio::spawn(said(node.owner(&["allow", "true", "--exact", &(n / 2).to_string()]), 0));
    let owners: Vec<_> = (0..8).map(say).collect();
    // The node notes what it has used, unless it would have to wait.
    for _ in 0..8 {
        node.run(&["true"]).await.unwrap();
    }
    for owner in owners {
        soon(owner).await.unwrap();
    }
    node.run(&["true"]).await.unwrap();
    let file = node.call("system.execApprovals.get", json!({})).await.unwrap();
    let entries = file["file"]["agents"]["main"]["allowlist"].as_array().unwrap();
    assert_eq!(entries.len(), 5, "{entries:?}");
    assert!(entries[0]["lastUsedAt"].is_u64(), "{entries:?}");
}

#[tokio::test]
async fn where_programs_are_not_to_be_run_the_tools_are_not_listed() {
    let names = async |node: &Node| {
        let tools = node.client().rpc("1", "tools/list", "{}").await.json()["result"]["tools"].clone();
        let names = tools.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap().to_owned());
        names.filter(|name| name.starts_with("system.")).collect::<Vec<_>>()
    };
    let approvals = ["system.execApprovals.get", "system.execApprovals.set"];
    let node = Node::start().await;
    assert_eq!(names(&node).await, [&["system.run", "system.run.prepare"][..], &approvals].concat());
    let node = Node::start_with(Options { is_run_enabled: false }).await;
    node.open().await;
    assert_eq!(names(&node).await, approvals);
    for tool in ["system.run", "system.run.prepare"] {
        let error = node.call(tool, json!({ "command": ["true"] })).await.unwrap_err();
        assert!(error.contains("Run system tools"), "{error}");
    }
}

#[tokio::test]
async fn the_policy_moves_to_where_the_other_programs_keep_it() {
    let node = Node::start().await;
    node.approvals(&["allow", "true"], 0).await;
    let mut list = node.owner(&["list"]);
    list.env("OPENCLAW_STATE_DIR", "~/state").env("OPENCLAW_HOME", &node.data);
    let listed = said(list, 0).await;
    let moved = node.data.join("state").join(FILE_NAME);
    assert!(listed.contains(&*moved.to_string_lossy()) && listed.contains("/true"), "{listed}");
    assert!(moved.exists() && !node.policy().exists());
}
