//! Capabilities, and the one list of them that every transport serves.
//!
//! A transport asks the [`Registry`] who handles a command and hands the [`Request`] to [`run`], which contains a
//! panic and ends what ignores its cancellation. Arguments are read forgivingly ([`Args`]): one of the wrong type
//! counts as absent, so that a caller written for another version of a command still gets an answer.

pub mod app;
pub mod browser;
pub mod camera;
pub mod canvas;
#[cfg(all(unix, not(target_os = "macos")))]
mod dbus;
pub mod device;
pub mod exec;
pub mod location;
pub mod media;
#[cfg(windows)]
mod powershell;
pub mod program;
mod scratch;
pub mod screen;
pub mod stt;
pub mod system;
pub mod tts;
mod wav;

use std::sync::{Arc, RwLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long a cancelled command may take to clean up; then its future is dropped, with the processes it started.
pub const CLEAN_UP: Duration = Duration::from_secs(2);
/// The beginning of the commands that steer the node itself.
const OWN_PREFIX: &str = "app.";

/// A category of commands.
pub trait Capability: Send + Sync + 'static {
    /// The category.
    fn category(&self) -> &str;

    /// The commands, in the order in which they are listed.
    fn commands(&self) -> Vec<&str>;

    /// Whether a command can work here and now, and so is listed. One that cannot says why when it is called.
    fn is_available(&self, _command: &str) -> bool {
        true
    }

    /// Whether a call of this name is for this capability.
    fn can_handle(&self, command: &str) -> bool {
        self.commands().contains(&command)
    }

    /// What a command is for, if the node's own table of descriptions does not say.
    fn description(&self, _command: &str) -> Option<&str> {
        None
    }

    /// The JSON Schema of a command's arguments; `None` if it takes anything.
    fn input_schema(&self, _command: &str) -> Option<Value> {
        None
    }

    /// Carries out a command. Once `cancel` fires nobody waits for the response any more; what was started must be
    /// stopped within [`CLEAN_UP`].
    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response>;
}

/// A command to carry out.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The command's name.
    pub command: String,
    /// What it came with.
    pub args: Args,
    /// On whose behalf, as a remote transport knows it. It is never read from the arguments.
    pub session_key: Option<String>,
}

/// The arguments of a command. Every reader gives its default for what is absent or of another type.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Args(Value);

impl Args {
    /// Wraps arguments; anything but an object holds none.
    pub fn new(args: Value) -> Self {
        Args(args)
    }

    /// The argument itself.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// A string.
    pub fn string(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_str()
    }

    /// A whole number within 32 bits, written without point and exponent.
    pub fn int(&self, name: &str) -> Option<i32> {
        self.get(name)?.as_i64()?.try_into().ok()
    }

    /// `true` or `false`.
    pub fn bool(&self, name: &str) -> Option<bool> {
        self.get(name)?.as_bool()
    }

    /// Any number.
    pub fn double(&self, name: &str) -> Option<f64> {
        self.get(name)?.as_f64()
    }

    /// The strings of an array, trimmed; what is blank or no string is left out.
    pub fn strings(&self, name: &str) -> Vec<&str> {
        let elements = self.get(name).and_then(Value::as_array).into_iter().flatten();
        elements.filter_map(Value::as_str).map(str::trim).filter(|text| !text.is_empty()).collect()
    }
}

/// What became of a command.
#[derive(Debug, Clone, PartialEq)]
pub enum Response {
    /// It was carried out; that a program exited with an error is said in the payload.
    Done {
        /// Any JSON.
        payload: Value,
        /// The pictures and videos that it holds, for clients that can show them.
        images: Vec<Image>,
    },
    /// It could not be carried out, and why.
    Failed(String),
}

/// A picture, or a video.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Its media type.
    pub mime_type: String,
    /// Its bytes in Base64.
    pub base64: String,
}

impl Image {
    /// Whether MCP has a kind of content for it.
    pub fn is_picture(&self) -> bool {
        self.mime_type.starts_with("image/")
    }
}

impl Response {
    /// A payload without pictures.
    pub fn done(payload: Value) -> Self {
        Response::Done { payload, images: Vec::new() }
    }

    /// A failure.
    pub fn failed(error: impl Into<String>) -> Self {
        Response::Failed(error.into())
    }

    /// The failure of a command that a capability does not have.
    pub fn unknown_command(command: &str) -> Self {
        Response::Failed(format!("Unknown command: {command}"))
    }
}

/// Who may use a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposure {
    /// Clients on this machine, and whoever the bridge leads to.
    Everywhere,
    /// Clients on this machine alone.
    LocalOnly,
}

/// A capability as it is kept.
type Shared = Arc<dyn Capability>;

/// The one list of capabilities.
#[derive(Default)]
pub struct Registry {
    entries: RwLock<Arc<[(Shared, Exposure)]>>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let categories: Vec<String> = self.local().iter().map(|entry| entry.category().to_owned()).collect();
        f.debug_tuple("Registry").field(&categories).finish()
    }
}

impl Registry {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a capability.
    pub fn add(&self, capability: impl Capability, exposure: Exposure) {
        let mut entries = self.entries.write().expect(UNPOISONED);
        let added: (Shared, Exposure) = (Arc::new(capability), exposure);
        *entries = entries.iter().cloned().chain([added]).collect();
    }

    /// Puts another list in place of this one. A reader sees either all of the old or all of the new.
    pub fn replace(&self, capabilities: Vec<(Arc<dyn Capability>, Exposure)>) {
        *self.entries.write().expect(UNPOISONED) = capabilities.into();
    }

    fn entries(&self) -> Arc<[(Shared, Exposure)]> {
        Arc::clone(&self.entries.read().expect(UNPOISONED))
    }

    /// What clients on this machine may use.
    pub fn local(&self) -> Vec<Arc<dyn Capability>> {
        self.entries().iter().map(|(capability, _)| Arc::clone(capability)).collect()
    }

    /// What may be lent to others. A capability with a command of the node itself is not, whatever it was added as.
    pub fn remote(&self) -> Vec<Arc<dyn Capability>> {
        let is_own =
            |command: &str| command.get(..OWN_PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(OWN_PREFIX));
        let entries = self.entries();
        let lent = entries.iter().filter(|(capability, exposure)| {
            *exposure == Exposure::Everywhere && !capability.commands().into_iter().any(is_own)
        });
        lent.map(|(capability, _)| Arc::clone(capability)).collect()
    }
}

/// The first of `capabilities` that handles `command`.
pub fn find<'a>(capabilities: &'a [Arc<dyn Capability>], command: &str) -> Option<&'a Arc<dyn Capability>> {
    capabilities.iter().find(|capability| capability.can_handle(command))
}

/// Nothing panics while the list is locked.
const UNPOISONED: &str = "the list is only swapped under its lock";

/// A capability panicked. The message stays in this process: it may hold anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("internal error")]
pub struct Crashed;

/// Carries out a command in a task of its own, counted by `tasks`. Dropping the future does not end the command;
/// `cancel` does.
///
/// # Errors
/// [`Crashed`] if it panics.
pub async fn run(
    capability: Arc<dyn Capability>,
    request: Request,
    cancel: CancellationToken,
    tasks: &TaskTracker,
) -> Result<Response, Crashed> {
    let task = tasks.spawn(async move {
        let overdue = async {
            cancel.cancelled().await;
            tokio::time::sleep(CLEAN_UP).await;
        };
        tokio::select! {
            response = capability.execute(request, cancel.clone()) => response,
            () = overdue => Response::failed("cancelled"),
        }
    });
    task.await.map_err(|_| Crashed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    struct Named(&'static str, Vec<&'static str>);

    impl Capability for Named {
        fn category(&self) -> &str {
            self.0
        }

        fn commands(&self) -> Vec<&str> {
            self.1.clone()
        }

        fn execute(&self, request: Request, _: CancellationToken) -> BoxFuture<'_, Response> {
            Box::pin(async move {
                match &*request.command {
                    "crash" => panic!("a secret"),
                    "stubborn" => std::future::pending().await,
                    _ => Response::done(json!(self.0)),
                }
            })
        }
    }

    fn categories(capabilities: &[Arc<dyn Capability>]) -> Vec<&str> {
        capabilities.iter().map(|capability| capability.category()).collect()
    }

    #[test]
    fn the_first_capability_that_handles_a_command_gets_it() {
        let registry = Registry::new();
        registry.add(Named("a", vec!["x", "y"]), Exposure::Everywhere);
        let before = registry.local();
        registry.add(Named("b", vec!["y", "z"]), Exposure::Everywhere);
        let after = registry.local();
        assert_eq!((categories(&before), categories(&after)), (vec!["a"], vec!["a", "b"]));
        let category = |command| find(&after, command).map(|capability| capability.category());
        assert_eq!(["x", "y", "z", "X"].map(category), [Some("a"), Some("a"), Some("b"), None]);
    }

    #[test]
    fn what_steers_the_node_is_never_lent() {
        let registry = Registry::new();
        registry.add(Named("device", vec!["device.info"]), Exposure::Everywhere);
        registry.add(Named("secret", vec!["secret.x"]), Exposure::LocalOnly);
        registry.add(Named("app", vec!["harmless", "App.Connection.status"]), Exposure::Everywhere);
        assert_eq!(categories(&registry.local()), ["device", "secret", "app"]);
        assert_eq!(categories(&registry.remote()), ["device"]);
    }

    #[test]
    fn arguments_of_another_type_count_as_absent() {
        let args = Args::new(json!({ "s": "x", "i": 5, "f": 1.0, "big": 2_147_483_648_u32, "low": -2_147_483_648,
            "b": true, "list": [" a ", 1, "", "  ", "b"] }));
        assert_eq!((args.string("s"), args.string("i"), args.string("none")), (Some("x"), None, None));
        assert_eq!(
            ["i", "f", "big", "low", "s"].map(|name| args.int(name)),
            [Some(5), None, None, Some(i32::MIN), None]
        );
        assert_eq!((args.bool("b"), args.bool("i")), (Some(true), None));
        assert_eq!((args.double("f"), args.double("i"), args.double("s")), (Some(1.0), Some(5.0), None));
        assert_eq!((args.strings("list"), args.strings("s")), (vec!["a", "b"], vec![]));
        assert_eq!(serde_json::from_str(r#"{"n":1e2}"#).map(Args::new).unwrap().int("n"), None);
        for none in [Value::Null, json!([1]), json!("s")] {
            assert_eq!(Args::new(none).int("i"), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_is_contained_and_a_stubborn_command_is_dropped() {
        let tasks = TaskTracker::new();
        let capability: Arc<dyn Capability> = Arc::new(Named("a", vec![]));
        let request = |command: &str| Request { command: command.to_owned(), ..Request::default() };
        let token = CancellationToken::new();
        let run = |command| run(Arc::clone(&capability), request(command), token.clone(), &tasks);
        assert_eq!(run("crash").await, Err(Crashed));
        assert_eq!(run("x").await, Ok(Response::done(json!("a"))));
        token.cancel();
        assert_eq!(run("stubborn").await, Ok(Response::failed("cancelled")));
    }
}
