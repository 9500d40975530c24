//! A2UI messages: JSON Lines, read and checked.

use serde::Deserialize;
use serde_json::Value;

use super::Component;

/// The most bytes of a push.
pub(in super::super) const MAX_BYTES: usize = 4 << 20;
/// The most lines of a push that are not blank.
const MAX_LINES: usize = 4096;
/// The longest id or path, in bytes.
const MAX_NAME_BYTES: usize = 1024;
/// The kinds of messages.
const KINDS: [&str; 4] = ["beginRendering", "surfaceUpdate", "dataModelUpdate", "deleteSurface"];
/// What the messages of A2UI 0.9 have that those of 0.8 do not.
const NEWER: [&str; 4] = ["createSurface", "updateComponents", "updateDataModel", "version"];

/// Messages that are applied together.
#[derive(Debug)]
pub(in super::super) struct Push {
    /// Each with the number of its line.
    pub(super) messages: Vec<(usize, Message)>,
    /// What came with them.
    pub(super) props: Option<Value>,
}

/// One message.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(super) enum Message {
    /// A surface is to be drawn.
    BeginRendering { surface_id: String, root: String, catalog_id: Option<String>, styles: Option<Value> },
    /// Components of a surface are there or have changed.
    SurfaceUpdate { surface_id: String, components: Vec<Component> },
    /// Data has changed; all of it, if there is no path.
    DataModelUpdate { surface_id: String, path: Option<String>, contents: Vec<Value> },
    /// A surface is no longer needed.
    DeleteSurface { surface_id: String },
}

impl Push {
    /// Reads messages, one on each line. An error says which line is wrong, and nothing of what it holds.
    pub(in super::super) fn parse(jsonl: &str, props: Option<Value>) -> Result<Self, String> {
        if jsonl.len() > MAX_BYTES {
            return Err(format!("jsonl exceeds maximum size of {MAX_BYTES} bytes"));
        }
        let lines = || jsonl.split(['\n', '\r']).enumerate().filter(|(_, line)| !line.trim().is_empty());
        if lines().count() > MAX_LINES {
            return Err(format!("jsonl exceeds maximum of {MAX_LINES} lines"));
        }
        let messages = lines().map(|(index, line)| {
            let message = Message::parse(line).map_err(|error| format!("A2UI line {}: {error}", index + 1))?;
            Ok((index + 1, message))
        });
        Ok(Push { messages: messages.collect::<Result<_, String>>()?, props })
    }
}

impl Message {
    fn parse(line: &str) -> Result<Self, String> {
        let Ok(Value::Object(mut envelope)) = serde_json::from_str(line) else {
            return Err("not a JSON object".to_owned());
        };
        if NEWER.iter().any(|name| envelope.contains_key(*name)) {
            return Err(format!("A2UI 0.9 is not understood; send messages of 0.8: {}", KINDS.join(", ")));
        }
        envelope.retain(|name, _| KINDS.contains(&name.as_str()));
        let Some(kind) = envelope.keys().next().cloned().filter(|_| envelope.len() == 1) else {
            return Err(format!("a message must be one of {}", KINDS.join(", ")));
        };
        let message: Message =
            serde_json::from_value(Value::Object(envelope)).map_err(|_| format!("{kind} is malformed"))?;
        if message.names().any(|name| name.is_empty() || name.len() > MAX_NAME_BYTES) {
            return Err(format!("an id in {kind} is empty or longer than {MAX_NAME_BYTES} bytes"));
        }
        Ok(message)
    }

    /// The ids in it.
    fn names(&self) -> impl Iterator<Item = &str> {
        let (surface, components) = match self {
            Message::SurfaceUpdate { surface_id, components } => (surface_id, &**components),
            Message::BeginRendering { surface_id, .. }
            | Message::DataModelUpdate { surface_id, .. }
            | Message::DeleteSurface { surface_id } => (surface_id, &[][..]),
        };
        std::iter::once(&**surface).chain(components.iter().map(|component| &*component.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(jsonl: &str) -> String {
        Push::parse(jsonl, None).unwrap_err()
    }

    #[test]
    fn each_line_is_a_message_and_blank_ones_are_none() {
        let text = "\n{\"deleteSurface\":{\"surfaceId\":\"a\"}}\r\n  \n{\"beginRendering\":{\"surfaceId\":\"a\",\"root\":\"r\"}}";
        let push = Push::parse(text, None).unwrap();
        assert_eq!(push.messages.len(), 2);
        assert!(matches!(&push.messages[1].1, Message::BeginRendering { root, .. } if root == "r"));
    }

    #[test]
    fn what_is_wrong_is_told_by_its_line_without_what_it_holds() {
        let good = r#"{"deleteSurface":{"surfaceId":"a"}}"#;
        for (line, says) in [
            ("secret", "not a JSON object"),
            ("[1]", "not a JSON object"),
            (r#"{"secret":{}}"#, "must be one of beginRendering, surfaceUpdate, dataModelUpdate, deleteSurface"),
            (r#"{"deleteSurface":{"surfaceId":"a"},"beginRendering":{}}"#, "must be one of"),
            (r#"{"createSurface":{"surfaceId":"secret"}}"#, "A2UI 0.9 is not understood"),
            (r#"{"version":"v0.9","deleteSurface":{"surfaceId":"a"}}"#, "A2UI 0.9 is not understood"),
            (r#"{"deleteSurface":{"surfaceId":7}}"#, "deleteSurface is malformed"),
            (r#"{"deleteSurface":{"surfaceId":""}}"#, "an id in deleteSurface is empty"),
            (r#"{"surfaceUpdate":{"surfaceId":"a"}}"#, "surfaceUpdate is malformed"),
            (r#"{"surfaceUpdate":{"surfaceId":"a","components":[{"id":"secret"}]}}"#, "surfaceUpdate is malformed"),
        ] {
            let error = error(&format!("{good}\n{line}\n{good}"));
            assert!(error.starts_with("A2UI line 2: ") && error.contains(says), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_push_is_bounded_by_bytes_and_lines() {
        let line = r#"{"deleteSurface":{"surfaceId":"a"}}"#;
        assert!(Push::parse(&format!("{line}\n\n").repeat(MAX_LINES), None).is_ok());
        assert_eq!(error(&format!("{line}\n").repeat(MAX_LINES + 1)), "jsonl exceeds maximum of 4096 lines");
        let padded = format!("{line}{}", " ".repeat(MAX_BYTES - line.len()));
        assert!(Push::parse(&padded, None).is_ok());
        assert_eq!(error(&format!("{padded} ")), "jsonl exceeds maximum size of 4194304 bytes");
    }
}
