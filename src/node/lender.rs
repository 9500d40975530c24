//! The registry of capabilities as a [`Lender`]: what of it is lent over a bridge, and the calls that come.
//!
//! Only what is named is lent: a command that is new here stays at home until somebody says otherwise. A picture goes
//! as an image of its own and not as Base64 in the text as well, where a model would have to read it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::bridge_client::frames::Answer;
use super::bridge_client::{Lender, ProgressSink, ToolCall};
use super::capabilities::{self, Args, Crashed, Image, Registry, Request, Response};
use super::filter::Filter;
use super::wire;

/// What is lent without a word on it: what shows nothing private without somebody's doing, and starts no program.
pub const LENT_BY_DEFAULT: [&str; 7] =
    ["system.notify", "system.which", "device.*", "screen.snapshot", "camera.list", "location.get", "canvas.*"];
/// How often it is looked whether other commands can work now.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// What is lent of a registry.
#[derive(Debug)]
pub struct RegistryLender {
    registry: Arc<Registry>,
    filter: Filter,
    /// On whose behalf calls are made, as far as capabilities are told.
    session_key: String,
    tools: watch::Sender<Arc<str>>,
    tasks: TaskTracker,
}

impl RegistryLender {
    /// Lends what `also` names beside [`LENT_BY_DEFAULT`], without what `not` names.
    pub fn new(registry: Arc<Registry>, also: &[String], not: &[String], session_key: String) -> Self {
        let include = LENT_BY_DEFAULT.iter().map(ToString::to_string).chain(also.iter().cloned()).collect();
        let lender = RegistryLender {
            registry,
            filter: Filter { include, exclude: not.to_vec() },
            session_key,
            tools: watch::Sender::new("[]".into()),
            tasks: TaskTracker::new(),
        };
        lender.refresh();
        lender
    }

    /// Looks again and again what can be lent, until `stop`.
    pub async fn keep_fresh(&self, stop: &CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(REFRESH_INTERVAL)).await.is_some() {
            self.refresh();
        }
    }

    fn refresh(&self) {
        let tools: Arc<str> = wire::tools(&self.registry.remote(), |command| self.filter.takes(command)).into();
        self.tools.send_if_modified(|current| {
            let is_new = **current != *tools;
            *current = tools;
            is_new
        });
    }
}

impl Lender for RegistryLender {
    fn tools(&self) -> watch::Receiver<Arc<str>> {
        self.tools.subscribe()
    }

    async fn call(&self, call: ToolCall, _: ProgressSink, cancelled: CancellationToken) -> Answer {
        let capabilities = self.registry.remote();
        let found = capabilities::find(&capabilities, &call.tool).filter(|_| self.filter.takes(&call.tool));
        let Some(capability) = found else {
            return Answer::Failed(format!("Unknown tool: {}", call.tool));
        };
        let args = match serde_json::from_str(&call.arguments) {
            Ok(args) => Args::new(args),
            Err(error) => return Answer::Failed(format!("The arguments cannot be read: {error}.")),
        };
        let request = Request { command: call.tool, args, session_key: Some(self.session_key.clone()) };
        match capabilities::run(Arc::clone(capability), request, cancelled, &self.tasks).await {
            Ok(response) => answer(response),
            Err(Crashed) => Answer::Failed("internal error".into()),
        }
    }
}

fn answer(response: Response) -> Answer {
    match response {
        Response::Failed(error) if error.is_empty() => Answer::Failed("tool execution failed".into()),
        Response::Failed(error) => Answer::Failed(error),
        Response::Done { payload, images } if images.is_empty() => Answer::Content(payload.to_string()),
        Response::Done { mut payload, images } => {
            leave_out(&mut payload, &images);
            Answer::Result(wire::result(&payload, &images))
        }
    }
}

/// Takes out of a payload what its pictures hold: their Base64, plain or as a `data:` URL.
fn leave_out(payload: &mut Value, images: &[Image]) {
    let Some(members) = payload.as_object_mut() else { return };
    members.retain(|_, value| {
        let text = value.as_str().unwrap_or_default();
        !images.iter().any(|image| !image.base64.is_empty() && text.ends_with(&image.base64))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::capabilities::{Capability, Exposure};
    use futures_util::future::BoxFuture;
    use serde_json::json;

    struct Desktop;

    impl Capability for Desktop {
        fn category(&self) -> &str {
            "x"
        }

        fn commands(&self) -> Vec<&str> {
            vec!["device.new", "screen.snapshot", "screen.record", "canvas.eval", "system.run", "system.run.prepare"]
        }

        fn is_available(&self, command: &str) -> bool {
            command != "canvas.eval"
        }

        fn execute(&self, request: Request, _: CancellationToken) -> BoxFuture<'_, Response> {
            Box::pin(async move { Response::done(json!([request.command, request.session_key])) })
        }
    }

    struct Own;

    impl Capability for Own {
        fn category(&self) -> &str {
            "app"
        }

        fn commands(&self) -> Vec<&str> {
            vec!["app.status"]
        }

        fn execute(&self, _: Request, _: CancellationToken) -> BoxFuture<'_, Response> {
            Box::pin(async { Response::done(json!(1)) })
        }
    }

    fn lent(also: &[&str], not: &[&str]) -> Vec<String> {
        let registry = Registry::new();
        registry.add(Desktop, Exposure::Everywhere);
        registry.add(Own, Exposure::Everywhere);
        let own = |patterns: &[&str]| patterns.iter().map(ToString::to_string).collect::<Vec<_>>();
        let lender = RegistryLender::new(Arc::new(registry), &own(also), &own(not), "k".into());
        let tools: Value = serde_json::from_str(&lender.tools().borrow()).unwrap();
        tools.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn only_what_is_harmless_or_named_is_lent_and_what_steers_the_node_never() {
        assert_eq!(lent(&[], &[]), ["device.new", "screen.snapshot"]);
        assert_eq!(lent(&["system.run*"], &["screen.*"]), ["device.new", "system.run", "system.run.prepare"]);
        let everything = ["device.new", "screen.snapshot", "screen.record", "system.run", "system.run.prepare"];
        assert_eq!(lent(&["*"], &[]), everything);
        assert_eq!(lent(&["app.*"], &["*"]), [""; 0]);
    }

    #[test]
    fn a_picture_goes_once_and_as_a_picture_and_a_video_as_a_resource() {
        let image = Image { mime_type: "image/png".into(), base64: "QUJD".into() };
        let payload = json!({ "format": "png", "width": 1, "base64": "QUJD", "image": "data:image/png;base64,QUJD" });
        let Answer::Result(result) = answer(Response::Done { payload, images: vec![image] }) else { panic!() };
        let result: Value = serde_json::from_str(&result).unwrap();
        assert_eq!(
            result,
            json!({ "content": [
                { "type": "text", "text": r#"{"format":"png","width":1}"# },
                { "type": "image", "data": "QUJD", "mimeType": "image/png" },
            ], "isError": false })
        );
        let video = Image { mime_type: "video/mp4".into(), base64: "QUJD".into() };
        let payload = json!({ "format": "mp4", "base64": "QUJD" });
        let Answer::Result(result) = answer(Response::Done { payload, images: vec![video] }) else { panic!() };
        let result: Value = serde_json::from_str(&result).unwrap();
        assert_eq!(
            result["content"],
            json!([
                { "type": "text", "text": r#"{"format":"mp4"}"# },
                { "type": "resource",
                    "resource": { "uri": "openclaw-node:video", "blob": "QUJD", "mimeType": "video/mp4" } },
            ])
        );
        assert_eq!(answer(Response::done(json!({ "a": 1.5 }))), Answer::Content(r#"{"a":1.5}"#.into()));
        assert_eq!(answer(Response::failed("")), Answer::Failed("tool execution failed".into()));
    }
}
