//! What an app registered: checked once, then immutable.
//!
//! A tool list is checked as a whole and rendered at once, in the two forms that clients of the two eras of MCP
//! take, so that `tools/list` is a copy of bytes and one bad tool refuses the registration: real clients drop
//! *all* tools of a server when a single one is malformed. Schemas are relayed byte for byte.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::HashSet;

use bytes::Bytes;
use icu_properties::props::{DefaultIgnorableCodePoint, GeneralCategory};
use icu_properties::{CodePointMapData, CodePointSetData};
use serde_json::Value;

use crate::json::{self, Reader};
use crate::mcp::Output;
use crate::mcp::headers::ParamHeaders;
use crate::mcp::schema;
use crate::protocol::{Features, SessionId, Spelling};
use crate::proxy::metrics::Limit;

/// The longest tool name, in Unicode scalar values (MCP allows 128 characters).
pub const MAX_TOOL_NAME_CHARS: usize = 128;

/// The longest `device_id`, `device_name` and `app_version`, in bytes: they are kept, shown and logged.
pub const MAX_LABEL_BYTES: usize = 1024;

/// The bounds that a registration must keep.
#[derive(Debug, Clone, Copy)]
pub struct ToolLimits {
    /// The most tools of a session.
    pub tools: usize,
    /// The most bytes of one definition.
    pub tool_bytes: usize,
    /// The most bytes of all definitions together.
    pub tools_bytes: usize,
    /// The most arguments of a tool that clients repeat in headers.
    pub param_headers: usize,
    /// The most bytes of the instructions.
    pub instructions_bytes: usize,
    /// The deepest nesting of the body.
    pub json_depth: usize,
}

/// A registration's body, checked.
#[derive(Debug)]
pub struct Registration {
    /// Known by `device_id`; required.
    pub device_id: String,
    /// Shown to MCP clients as the server's title.
    pub device_name: Option<String>,
    /// The app's version.
    pub app_version: Option<String>,
    /// Told to MCP clients when they connect.
    pub instructions: Option<String>,
    /// What the app opted in to.
    pub features: Features,
    /// How it spells its frames.
    pub spelling: Spelling,
    /// The app wants a secret that only it can use the session with.
    pub wants_session_secret: bool,
    /// The app wants a token with which MCP clients get to this session alone.
    pub wants_mcp_token: bool,
    /// Its tools.
    pub tools: ToolSet,
}

/// A session as it is known to all parts of the proxy: data only, replaced as a whole when its tools change.
#[derive(Debug)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// What the app registered.
    pub registration: Registration,
    /// The server's identity as MCP clients see it, as JSON text.
    pub server_info: Bytes,
}

impl Session {
    /// A session of this id.
    pub fn new(id: SessionId, registration: Registration) -> Self {
        let server_info = crate::mcp::server_info(registration.device_name.as_deref());
        Session { id, registration, server_info }
    }

    /// The same session with other tools.
    pub fn with_tools(&self, tools: ToolSet) -> Self {
        let old = &self.registration;
        Session {
            id: self.id,
            registration: Registration {
                device_id: old.device_id.clone(),
                device_name: old.device_name.clone(),
                app_version: old.app_version.clone(),
                instructions: old.instructions.clone(),
                features: old.features,
                spelling: old.spelling,
                wants_session_secret: old.wants_session_secret,
                wants_mcp_token: old.wants_mcp_token,
                tools,
            },
            server_info: self.server_info.clone(),
        }
    }
}

/// A session's tools, and the lists that MCP clients get.
#[derive(Debug)]
pub struct ToolSet {
    tools: HashMap<Box<str>, Tool>,
    legacy_list: Bytes,
    modern_list: Bytes,
    /// What the app's developer should know, though nothing was refused.
    pub warnings: Vec<String>,
}

/// What the proxy itself must know of a tool.
#[derive(Debug)]
pub struct Tool {
    /// The root type of `output_schema`, if it has one: clients then demand `structuredContent`.
    pub output: Output,
    /// The arguments that 2026-07-28 clients copy into HTTP headers.
    pub param_headers: ParamHeaders,
}

/// Why a registration, or a change of tools, is not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// A sentence that names the member, and the tool if it is about one.
    pub detail: String,
    /// The bound that was met, if it was one.
    pub limit: Option<Limit>,
}

impl From<String> for Rejected {
    fn from(detail: String) -> Self {
        Rejected { detail, limit: None }
    }
}

impl ToolSet {
    /// Checks the text of a `tools` array and renders it.
    ///
    /// # Errors
    /// A sentence that names the tool and the member.
    pub fn parse(tools: &str, limits: &ToolLimits) -> Result<Self, Rejected> {
        let texts = json::few_elements(tools, limits.json_depth, limits.tools);
        let Some(texts) = texts.map_err(|error| format!("tools: {error}."))? else {
            let limit = limits.tools;
            let detail = format!("tools: more than {limit} tools are given; the limit is {limit}.");
            return Err(Rejected { detail, limit: Some(Limit::Tools) });
        };
        let all_bytes: usize = texts.iter().map(|text| text.len()).sum();
        if all_bytes > limits.tools_bytes {
            let detail = format!("tools: the definitions take {all_bytes} bytes; the limit is {}.", limits.tools_bytes);
            return Err(Rejected { detail, limit: Some(Limit::ToolsBytes) });
        }
        let mut set = ToolSet {
            tools: HashMap::with_capacity(texts.len()),
            legacy_list: Bytes::new(),
            modern_list: Bytes::new(),
            warnings: Vec::new(),
        };
        let mut legacy = b"[".to_vec();
        let mut modern = b"[".to_vec();
        let mut trimmed_names = HashSet::new();
        for (index, text) in texts.into_iter().enumerate() {
            let definition = Definition::read(index, text, limits)?;
            let place = definition.place(index);
            if !trimmed_names.insert(definition.name.trim().to_owned()) {
                return Err(format!("{place}: the name is given twice.").into());
            }
            if !is_portable(&definition.name) {
                let advice = "many clients accept only 1 to 64 of A-Z a-z 0-9 _ . - in a name";
                set.warnings.push(format!("{place}: {advice}."));
            }
            let tool = definition.check(&place, limits)?;
            for (list, with_output) in [(&mut legacy, tool.output == Output::Object), (&mut modern, true)] {
                if index > 0 {
                    list.push(b',');
                }
                definition.render(list, with_output);
            }
            set.tools.insert(definition.name.into(), tool);
        }
        legacy.push(b']');
        modern.push(b']');
        // Kept for as long as the session lives, so without room to grow.
        set.modern_list = modern.into_boxed_slice().into();
        // Most often the two are the same, and then they share their bytes.
        set.legacy_list =
            if legacy == set.modern_list { set.modern_list.clone() } else { legacy.into_boxed_slice().into() };
        Ok(set)
    }

    /// The `tools` array for clients up to 2025-11-25.
    pub fn legacy_list(&self) -> &Bytes {
        &self.legacy_list
    }

    /// The `tools` array for clients from 2026-07-28 on.
    pub fn modern_list(&self) -> &Bytes {
        &self.modern_list
    }

    /// The tool of this name.
    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.tools.get(name)
    }

    /// Their names, in order.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tools.keys().map(|name| &**name).collect();
        names.sort_unstable();
        names
    }

    /// How many tools there are.
    pub fn len(&self) -> usize {
        self.tools.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }
}

impl Registration {
    /// Checks the body of `POST /v1/chat/sessions`.
    ///
    /// # Errors
    /// A sentence that names the member, and the tool if it is about one.
    pub fn parse(body: &str, limits: &ToolLimits) -> Result<Self, Rejected> {
        let mut members = Members::default();
        read_members(body, limits.json_depth, |key, value| {
            let slot = match key {
                "device_id" | "deviceId" => {
                    members.spelling = if key == "deviceId" { Spelling::Camel } else { Spelling::Snake };
                    ("device_id", &mut members.device_id)
                }
                "device_name" | "deviceName" => ("device_name", &mut members.device_name),
                "app_version" | "appVersion" => ("app_version", &mut members.app_version),
                "chat_id" | "chatId" => ("chat_id", &mut members.chat_id),
                "user_id" | "userId" => ("user_id", &mut members.user_id),
                "instructions" => ("instructions", &mut members.instructions),
                "tools" => ("tools", &mut members.tools),
                "bridge_features" | "bridgeFeatures" => ("bridge_features", &mut members.bridge_features),
                "want_session_secret" | "wantSessionSecret" => ("want_session_secret", &mut members.session_secret),
                "want_mcp_token" | "wantMcpToken" => ("want_mcp_token", &mut members.mcp_token),
                _ => return Ok(()),
            };
            set(slot, value)
        })?;
        let device_id = label("device_id", members.device_id)?.unwrap_or_default();
        if device_id.is_empty() {
            return Err("device_id: a non-empty string is required.".to_owned().into());
        }
        // The app's own ids of its chat and user: nothing here acts on them, but they must be what they claim.
        text("chat_id", members.chat_id)?;
        text("user_id", members.user_id)?;
        let most = (limits.instructions_bytes, Some(Limit::InstructionsBytes));
        let instructions = bounded("instructions", members.instructions, most)?;
        Ok(Registration {
            device_id: device_id.into_owned(),
            device_name: label("device_name", members.device_name)?
                .map(|name| name.chars().filter(|c| !is_deceptive(*c)).collect()),
            app_version: label("app_version", members.app_version)?.map(Cow::into_owned),
            instructions: instructions.map(Cow::into_owned),
            features: features(members.bridge_features)?,
            spelling: members.spelling,
            wants_session_secret: flag("want_session_secret", members.session_secret)?,
            wants_mcp_token: flag("want_mcp_token", members.mcp_token)?,
            tools: ToolSet::parse(members.tools.unwrap_or("[]"), limits)?,
        })
    }
}

impl Registration {
    /// A body that says the same, with each tool as MCP clients get it.
    pub fn to_body(&self) -> String {
        let device_id = match self.spelling {
            Spelling::Snake => "device_id",
            Spelling::Camel => "deviceId",
        };
        let members = serde_json::json!({
            device_id: self.device_id,
            "device_name": self.device_name,
            "app_version": self.app_version,
            "instructions": self.instructions,
            "bridge_features": self.features.names(),
            "want_session_secret": self.wants_session_secret,
            "want_mcp_token": self.wants_mcp_token,
        });
        let mut body = members.to_string();
        body.truncate(body.len() - 1);
        // Rendered from text.
        let tools = std::str::from_utf8(self.tools.modern_list()).unwrap_or("[]");
        format!("{body},\"tools\":{tools}}}")
    }
}

/// The text of the `tools` array in the body of `PUT …/tools`.
///
/// # Errors
/// A sentence, if the body is not an object with such an array.
pub fn tools_member(body: &str, json_depth: usize) -> Result<&str, String> {
    let mut tools = None;
    read_members(
        body,
        json_depth,
        |key, value| if key == "tools" { set(("tools", &mut tools), value) } else { Ok(()) },
    )?;
    tools.ok_or_else(|| "tools: an array is required.".into())
}

#[derive(Default)]
struct Members<'a> {
    spelling: Spelling,
    device_id: Option<&'a str>,
    device_name: Option<&'a str>,
    app_version: Option<&'a str>,
    chat_id: Option<&'a str>,
    user_id: Option<&'a str>,
    instructions: Option<&'a str>,
    tools: Option<&'a str>,
    bridge_features: Option<&'a str>,
    session_secret: Option<&'a str>,
    mcp_token: Option<&'a str>,
}

/// Walks an object; `null` members count as absent.
fn read_members<'a>(
    object: &'a str,
    json_depth: usize,
    mut each: impl FnMut(&str, &'a str) -> Result<(), String>,
) -> Result<(), String> {
    let fault = |error| format!("{error}.");
    let mut reader = Reader::new(object, json_depth);
    reader.begin_object().map_err(fault)?;
    while let Some(key) = reader.next_key().map_err(fault)? {
        let value = reader.value().map_err(fault)?;
        if value != "null" {
            each(&key, value)?;
        }
    }
    reader.end().map_err(fault)
}

fn set<'a>((name, slot): (&str, &mut Option<&'a str>), value: &'a str) -> Result<(), String> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("{name}: the member is given twice.")),
    }
}

fn text<'a>(name: &str, value: Option<&'a str>) -> Result<Option<Cow<'a, str>>, String> {
    match value {
        None => Ok(None),
        Some(value) => json::as_string(value).map(Some).ok_or_else(|| format!("{name}: a string is required.")),
    }
}

/// The text of a member that may take so many bytes; that may be a bound of the settings.
fn bounded<'a>(
    name: &str,
    value: Option<&'a str>,
    (most, limit): (usize, Option<Limit>),
) -> Result<Option<Cow<'a, str>>, Rejected> {
    let text = text(name, value)?;
    match text.as_ref().map_or(0, |text| text.len()) {
        size if size > most => {
            Err(Rejected { detail: format!("{name}: it takes {size} bytes; the limit is {most}."), limit })
        }
        _ => Ok(text),
    }
}

fn label<'a>(name: &str, value: Option<&'a str>) -> Result<Option<Cow<'a, str>>, Rejected> {
    bounded(name, value, (MAX_LABEL_BYTES, None))
}

fn flag(name: &str, value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(format!("{name}: true or false is required.")),
    }
}

fn features(value: Option<&str>) -> Result<Features, String> {
    let mut features = Features::default();
    let Some(value) = value else { return Ok(features) };
    let mut are_strings = true;
    // A newer app may know features that this proxy does not; it sees from the frames which are in use.
    let read = json::elements(value, json::MAX_DEPTH, |name| match json::as_string(name) {
        Some(name) => {
            features.enable(&name);
        }
        None => are_strings = false,
    });
    if read.is_err() || !are_strings {
        return Err("bridge_features: an array of strings is required.".into());
    }
    Ok(features)
}

/// One tool definition, its members still text.
struct Definition<'a> {
    name: String,
    title: Option<&'a str>,
    description: Option<&'a str>,
    input_schema: Option<&'a str>,
    output_schema: Option<&'a str>,
    annotations: Option<&'a str>,
    icons: Option<&'a str>,
    meta: Option<&'a str>,
}

impl<'a> Definition<'a> {
    fn read(index: usize, definition: &'a str, limits: &ToolLimits) -> Result<Self, Rejected> {
        let here = format!("tools[{index}]");
        let mut name = None;
        let mut path = None;
        let mut read = Definition {
            name: String::new(),
            title: None,
            description: None,
            input_schema: None,
            output_schema: None,
            annotations: None,
            icons: None,
            meta: None,
        };
        if !json::is_object(definition) {
            return Err(format!("{here}: an object is required.").into());
        }
        read_members(definition, limits.json_depth, |key, value| {
            let slot = match key {
                "name" => ("name", &mut name),
                "path" => ("path", &mut path),
                "title" => ("title", &mut read.title),
                "description" => ("description", &mut read.description),
                "input_schema" | "inputSchema" => ("input_schema", &mut read.input_schema),
                "output_schema" | "outputSchema" => ("output_schema", &mut read.output_schema),
                "annotations" => ("annotations", &mut read.annotations),
                "icons" => ("icons", &mut read.icons),
                "_meta" => ("_meta", &mut read.meta),
                _ => return Ok(()),
            };
            set(slot, value)
        })
        .map_err(|error| format!("{here}: {error}"))?;
        read.name = text("name", name)
            .map_err(|error| format!("{here}: {error}"))?
            .ok_or_else(|| format!("{here}: name: a string is required."))?
            .into_owned();
        let place = read.place(index);
        check_name(&read.name).map_err(|error| format!("{place}: name: {error}"))?;
        if definition.len() > limits.tool_bytes {
            let size = definition.len();
            let detail = format!("{place}: the definition takes {size} bytes; the limit is {}.", limits.tool_bytes);
            return Err(Rejected { detail, limit: Some(Limit::ToolBytes) });
        }
        for (member, value) in [("path", path), ("title", read.title), ("description", read.description)] {
            text(member, value).map_err(|error| format!("{place}: {error}"))?;
        }
        check_title("title", read.title).map_err(|error| format!("{place}: {error}"))?;
        Ok(read)
    }

    /// How messages name this tool.
    fn place(&self, index: usize) -> String {
        format!("tools[{index}] '{}'", shown(&self.name))
    }

    fn check(&self, place: &str, limits: &ToolLimits) -> Result<Tool, Rejected> {
        let at = |error: String| format!("{place}: {error}");
        let mut param_headers = ParamHeaders::default();
        if let Some(schema) = self.input_schema {
            check_root(schema).map_err(|error| at(format!("input_schema: {error}")))?;
            param_headers = check_schema(schema).map_err(|error| at(format!("input_schema: {error}")))?;
            let (count, limit) = (param_headers.len(), limits.param_headers);
            if count > limit {
                let error = format!("input_schema: {count} properties have an x-mcp-header; the limit is {limit}.");
                return Err(Rejected { detail: at(error), limit: Some(Limit::ParamHeaders) });
            }
        }
        let mut output = Output::Unspecified;
        if let Some(schema) = self.output_schema {
            if !json::is_object(schema) {
                return Err(at("output_schema: an object is required.".into()).into());
            }
            check_schema(schema).map_err(|error| at(format!("output_schema: {error}")))?;
            let is_object = json::member(schema, "type") == Some("\"object\"");
            output = if is_object { Output::Object } else { Output::Any };
            if is_object {
                check_root(schema).map_err(|error| at(format!("output_schema: {error}")))?;
            }
        }
        check_annotations(self.annotations).map_err(at)?;
        check_icons(self.icons).map_err(at)?;
        if self.meta.is_some_and(|meta| !json::is_object(meta)) {
            return Err(at("_meta: an object is required.".into()).into());
        }
        Ok(Tool { output, param_headers })
    }

    /// Writes the tool as `tools/list` shows it, in MCP's spelling.
    fn render(&self, out: &mut Vec<u8>, with_output: bool) {
        let mut name = Vec::new();
        json::push_string(&mut name, &self.name);
        let mut member = |key: &str, value: Option<&[u8]>| {
            if let Some(value) = value {
                out.push(if key == "name" { b'{' } else { b',' });
                json::push_string(out, key);
                out.push(b':');
                out.extend_from_slice(value);
            }
        };
        member("name", Some(&name));
        member("title", self.title.map(str::as_bytes));
        // OpenClaw shows a placeholder for a tool without a description; its name says more.
        member("description", Some(self.description.map_or(&name[..], str::as_bytes)));
        member("inputSchema", Some(root_schema(self.input_schema).as_bytes()));
        member("outputSchema", self.output_schema.filter(|_| with_output).map(str::as_bytes));
        member("annotations", self.annotations.map(str::as_bytes));
        member("icons", self.icons.map(str::as_bytes));
        member("_meta", self.meta.map(str::as_bytes));
        out.push(b'}');
    }
}

/// A name in a message, escaped and cut, for it may hold anything.
fn shown(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

/// A name that every known client takes unchanged.
fn is_portable(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

fn check_name(name: &str) -> Result<(), String> {
    if name.trim().is_empty() {
        return Err("must not be empty.".into());
    }
    if name.chars().any(is_unprintable) {
        return Err("control and invisible formatting characters are not allowed.".into());
    }
    let chars = name.chars().count();
    if chars > MAX_TOOL_NAME_CHARS {
        return Err(format!("is {chars} characters long; the limit is {MAX_TOOL_NAME_CHARS}."));
    }
    Ok(())
}

/// Checks a title, the name that people see when they are asked whether a tool may run.
fn check_title(member: &str, title: Option<&str>) -> Result<(), String> {
    if title.and_then(json::as_string).is_some_and(|title| title.chars().any(is_deceptive)) {
        return Err(format!("{member}: control characters and those that re-order text are not allowed."));
    }
    Ok(())
}

/// Characters that make one read something else than what is there. Those that join emoji and letters are not among
/// them: people's languages need these.
fn is_deceptive(c: char) -> bool {
    c.is_control() || matches!(c, '\u{61c}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Characters that a person does not see, or that re-order what they see: with them, two tools could look the same.
fn is_unprintable(c: char) -> bool {
    // What shows nothing by design, such as variation selectors, fillers and tags.
    CodePointSetData::new::<DefaultIgnorableCodePoint>().contains(c)
        || matches!(
            CodePointMapData::<GeneralCategory>::new().get(c),
            GeneralCategory::Control
                | GeneralCategory::Format
                | GeneralCategory::LineSeparator
                | GeneralCategory::ParagraphSeparator
        )
        // A braille cell without dots.
        || c == '\u{2800}'
}

/// The schema as it is listed: the root type is made explicit, the rest is untouched.
fn root_schema(schema: Option<&str>) -> Cow<'_, str> {
    let Some(schema) = schema else { return Cow::Borrowed(r#"{"type":"object","properties":{}}"#) };
    let inner = schema[1..schema.len() - 1].trim();
    if inner.is_empty() {
        Cow::Borrowed(r#"{"type":"object","properties":{}}"#)
    } else if json::member(schema, "type").is_some() {
        Cow::Borrowed(schema)
    } else {
        Cow::Owned(format!(r#"{{"type":"object",{}"#, &schema[1..]))
    }
}

/// What the strictest clients check of a root schema: TypeScript's and Python's drop the whole list otherwise.
fn check_root(schema: &str) -> Result<(), String> {
    if !json::is_object(schema) {
        return Err("an object is required.".into());
    }
    if let Some(kind) = json::member(schema, "type")
        && kind != "\"object\""
    {
        return Err("the root 'type' must be \"object\".".into());
    }
    if let Some(properties) = json::member(schema, "properties") {
        let mut wrong = None;
        json::members(properties, |key, value| {
            if !json::is_object(value) {
                wrong.get_or_insert_with(|| key.to_owned());
            }
        })
        .map_err(|_| "'properties' must be an object.".to_owned())?;
        if let Some(key) = wrong {
            return Err(format!("properties.{} must be an object.", shown(&key)));
        }
    }
    if let Some(required) = json::member(schema, "required") {
        let mut are_strings = true;
        let is_array = json::elements(required, json::MAX_DEPTH, |name| are_strings &= json::is_string(name)).is_ok();
        if !is_array || !are_strings {
            return Err("'required' must be an array of strings.".into());
        }
    }
    Ok(())
}

/// Refuses what reaches beyond the schema, and finds the arguments that clients repeat in headers.
fn check_schema(schema: &str) -> Result<ParamHeaders, String> {
    let schema: Value = serde_json::from_str(schema).map_err(|error| format!("{error}."))?;
    schema::check(&schema)
}

fn check_annotations(annotations: Option<&str>) -> Result<(), String> {
    let Some(annotations) = annotations else { return Ok(()) };
    if !json::is_object(annotations) {
        return Err("annotations: an object is required.".into());
    }
    let mut wrong = None;
    let read = json::members(annotations, |key, value| {
        let fits = match key {
            "title" => json::is_string(value),
            "readOnlyHint" | "destructiveHint" | "idempotentHint" | "openWorldHint" => {
                matches!(value, "true" | "false")
            }
            _ => true,
        };
        if !fits {
            wrong.get_or_insert_with(|| key.to_owned());
        }
    });
    debug_assert!(read.is_ok(), "the body has been checked");
    check_title("annotations.title", json::member(annotations, "title"))?;
    match wrong {
        Some(key) if key == "title" => Err("annotations.title: a string is required.".into()),
        Some(key) => Err(format!("annotations.{key}: true or false is required.")),
        None => Ok(()),
    }
}

fn is_icon(icon: &str) -> bool {
    let member = |name: &str| json::member(icon, name);
    let are_strings = |sizes: &str| {
        let mut are_strings = true;
        json::elements(sizes, json::MAX_DEPTH, |size| are_strings &= json::is_string(size)).is_ok() && are_strings
    };
    member("src").is_some_and(json::is_string)
        && member("mimeType").is_none_or(json::is_string)
        && member("sizes").is_none_or(are_strings)
        && member("theme").is_none_or(|theme| matches!(theme, "\"light\"" | "\"dark\""))
}

fn check_icons(icons: Option<&str>) -> Result<(), String> {
    let Some(icons) = icons else { return Ok(()) };
    let mut are_icons = true;
    let read = json::elements(icons, json::MAX_DEPTH, |icon| are_icons &= is_icon(icon));
    if read.is_err() || !are_icons {
        let icon =
            "a string 'src', and may have a string 'mimeType', an array of strings 'sizes', a 'theme' of light or dark";
        return Err(format!("icons: an array is required, each of it an object with {icon}."));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ToolLimits = ToolLimits {
        tools: 3,
        tool_bytes: 400,
        tools_bytes: 700,
        param_headers: 2,
        instructions_bytes: 50,
        json_depth: 16,
    };

    fn tools(text: &str) -> Result<ToolSet, String> {
        ToolSet::parse(text, &LIMITS).map_err(|rejected| rejected.detail)
    }

    fn refused(text: &str, says: &str) {
        let error = tools(text).expect_err(text);
        assert!(error.contains(says), "{text}: {error}");
        assert!(error.ends_with('.'), "{error}");
    }

    #[test]
    fn schemas_are_listed_byte_for_byte() {
        let schema = r##"{"type":"object", "properties":{"b":{"$ref":"#/definitions/x"},"a":{"anyOf":[{"maximum":1234567890123456789}]}},"definitions":{"x":{"const":1E2}},"x-vendor":null}"##;
        let set = tools(&format!(r#"[{{"name":"t","input_schema":{schema}}}]"#)).unwrap();
        let expected = format!(r#"[{{"name":"t","description":"t","inputSchema":{schema}}}]"#);
        assert_eq!(set.legacy_list(), expected.as_bytes());
        assert_eq!(set.modern_list(), expected.as_bytes());
    }

    #[test]
    fn missing_parts_of_a_schema_are_made_explicit() {
        let listed = |member: &str| {
            let set = tools(&format!(r#"[{{"name":"t"{member}}}]"#)).unwrap();
            let list = String::from_utf8(set.legacy_list().to_vec()).unwrap();
            json::member(list.trim_matches(['[', ']']), "inputSchema").unwrap().to_owned()
        };
        let empty = r#"{"type":"object","properties":{}}"#;
        for member in ["", r#","input_schema":null"#, r#","input_schema":{ }"#] {
            assert_eq!(listed(member), empty, "{member}");
        }
        assert_eq!(listed(r#","inputSchema":{"properties":{}}"#), r#"{"type":"object","properties":{}}"#);
        assert_eq!(listed(r#","inputSchema":{ "title":"x" }"#), r#"{"type":"object", "title":"x" }"#);
    }

    #[test]
    fn older_clients_are_not_shown_an_output_schema_they_cannot_take() {
        let set =
            tools(r#"[{"name":"t","output_schema":{"type":"array"}},{"name":"u","outputSchema":{"type":"object"}}]"#)
                .unwrap();
        let list = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        assert_eq!(list(set.legacy_list()).matches("outputSchema").count(), 1);
        assert_eq!(list(set.modern_list()).matches("outputSchema").count(), 2);
        assert_eq!((set.get("t").unwrap().output, set.get("u").unwrap().output), (Output::Any, Output::Object));
    }

    #[test]
    fn a_bad_tool_is_refused_with_its_name_and_member() {
        refused("{}", "array");
        refused("[1]", "tools[0]: an object");
        refused(r#"[{"description":"x"}]"#, "tools[0]: name");
        refused(r#"[{"name":"a"},{"name":" a "}]"#, "tools[1] ' a ': the name is given twice");
        refused(r#"[{"name":""}]"#, "must not be empty");
        refused(r#"[{"name":"  "}]"#, "must not be empty");
        refused(r#"[{"name":"a\nb"}]"#, "control");
        refused(r#"[{"name":"a\u202eb"}]"#, "invisible");
        refused(r#"[{"name":"a","description":1}]"#, "'a': description: a string");
        refused(r#"[{"name":"a","path":1}]"#, "path");
        refused(r#"[{"name":"a","name":"b"}]"#, "given twice");
        refused(r#"[{"name":"a","input_schema":[]}]"#, "input_schema: an object");
        refused(r#"[{"name":"a","input_schema":{"type":"array"}}]"#, "root 'type'");
        refused(r#"[{"name":"a","input_schema":{"type":["object","null"]}}]"#, "root 'type'");
        refused(r#"[{"name":"a","input_schema":{"properties":{"p":true}}}]"#, "properties.p");
        refused(r#"[{"name":"a","input_schema":{"properties":{"p\u001b":true}}}]"#, "properties.p\\u{1b} must");
        refused(r#"[{"name":"a","input_schema":{"required":"p"}}]"#, "'required'");
        refused(r#"[{"name":"a","input_schema":{"properties":{"p":{"$ref":"http://x/y"}}}}]"#, "$ref");
        refused(r#"[{"name":"a","input_schema":{"properties":{"p":{"\u0024ref":"file:x"}}}}]"#, "$ref");
        refused(r#"[{"name":"a","output_schema":true}]"#, "output_schema");
        refused(r#"[{"name":"a","annotations":{"readOnlyHint":"yes"}}]"#, "annotations.readOnlyHint");
        for icon in [
            "{}",
            "5",
            r#"{"src":5}"#,
            r#"{"src":"x","sizes":"48x48"}"#,
            r#"{"src":"x","sizes":[48]}"#,
            r#"{"src":"x","mimeType":5}"#,
            r#"{"src":"x","theme":"blue"}"#,
        ] {
            refused(&format!(r#"[{{"name":"a","icons":[{icon}]}}]"#), "icons");
        }
        assert!(tools(r#"[{"name":"a","icons":[{"src":"x","sizes":["48x48"],"theme":"dark","x":1}]}]"#).is_ok());
        refused(r#"[{"name":"a","output_schema":{"type":"nope"}}]"#, "output_schema: type");
        refused(r##"[{"name":"a","input_schema":{"properties":{"p":{"$ref":"#/x"}}}}]"##, "no place");
        refused(r#"[{"name":"a","_meta":1}]"#, "_meta");
        refused(r#"[{"name":"a","title":"b\u202ec"}]"#, "title: control");
        refused(r#"[{"name":"a","annotations":{"title":"b\nc"}}]"#, "annotations.title: control");
    }

    #[test]
    fn limits_hold_on_both_sides() {
        assert!(tools(r#"[{"name":"a"},{"name":"b"},{"name":"c"}]"#).is_ok());
        refused(
            r#"[{"name":"a"},{"name":"b"},{"name":"c"},{"name":"d"}]"#,
            "more than 3 tools are given; the limit is 3",
        );
        let tool = |name: &str, bytes: usize| {
            let empty = format!(r#"{{"name":"{name}","description":""}}"#);
            empty.replace("\"\"", &format!("\"{}\"", "x".repeat(bytes - empty.len())))
        };
        assert!(tools(&format!("[{}]", tool("a", 400))).is_ok());
        refused(&format!("[{}]", tool("a", 401)), "takes 401 bytes; the limit is 400");
        assert!(tools(&format!("[{},{}]", tool("a", 350), tool("b", 350))).is_ok());
        refused(&format!("[{},{}]", tool("a", 350), tool("b", 351)), "take 701 bytes; the limit is 700");
        let named = |chars: usize| format!(r#"[{{"name":"{}"}}]"#, "\u{e9}".repeat(chars));
        assert!(tools(&named(128)).is_ok());
        refused(&named(129), "129 characters long; the limit is 128");
        let deep =
            |n: usize| format!(r#"[{{"name":"a","input_schema":{{"default":{}{}}}}}]"#, "[".repeat(n), "]".repeat(n));
        assert!(tools(&deep(13)).is_ok());
        refused(&deep(14), "16 levels");
        let annotated = |count: usize| {
            let properties = (0..count).map(|n| format!(r#""p{n}":{{"type":"string","x-mcp-header":"h{n}"}}"#));
            let properties = properties.collect::<Vec<_>>().join(",");
            let inside = format!(r#"{{"properties":{{"o":{{"properties":{{{properties}}}}}}}}}"#);
            format!(r#"[{{"name":"a","input_schema":{inside}}}]"#)
        };
        assert!(tools(&annotated(2)).is_ok());
        refused(&annotated(3), "3 properties have an x-mcp-header; the limit is 2");
    }

    #[test]
    fn unusual_names_are_taken_with_a_warning() {
        let set = tools(r#"[{"name":"\u5de5\u5177"},{"name":"ok_1.a-b"}]"#).unwrap();
        assert_eq!(set.warnings.len(), 1);
        assert!(set.warnings[0].contains("tools[0]"));
    }

    #[test]
    fn no_character_of_a_name_is_invisible() {
        let named = |name: String| tools(&serde_json::json!([{ "name": name }]).to_string());
        for c in [
            '\u{ad}',
            '\u{34f}',
            '\u{61c}',
            '\u{115f}',
            '\u{1160}',
            '\u{17b4}',
            '\u{180b}',
            '\u{180e}',
            '\u{200b}',
            '\u{200d}',
            '\u{2028}',
            '\u{202e}',
            '\u{2060}',
            '\u{2064}',
            '\u{2069}',
            '\u{206a}',
            '\u{2800}',
            '\u{3164}',
            '\u{fe0f}',
            '\u{feff}',
            '\u{ffa0}',
            '\u{fff9}',
            '\u{fffb}',
            '\u{1bca0}',
            '\u{1d173}',
            '\u{e0001}',
            '\u{e0041}',
            '\u{e0100}',
        ] {
            let error = named(format!("read{c}")).expect_err(&c.escape_unicode().to_string());
            assert!(error.contains("invisible"), "{error}");
        }
        for c in ['e', '\u{301}', ' ', '\u{5de5}', '\u{1f40d}', '\u{627}', '\u{ac00}', '\u{1100}'] {
            assert!(named(format!("read{c}x")).is_ok(), "{}", c.escape_unicode());
        }
    }

    #[test]
    fn header_annotations_follow_the_six_constraints() {
        let schema = |properties: &str| format!(r#"[{{"name":"a","input_schema":{{"properties":{properties}}}}}]"#);
        let set = tools(&schema(r#"{"o":{"properties":{"r":{"type":"string","x-mcp-header":"Region"}}}}"#)).unwrap();
        let values = set.get("a").unwrap().param_headers.values(r#"{"o":{"r":1}}"#).unwrap();
        assert_eq!(values.get("mcp-param-region"), Some(&"1"));
        for bad in [
            r#"{"r":{"type":"string","x-mcp-header":""}}"#,
            r#"{"r":{"type":"string","x-mcp-header":"a b"}}"#,
            r#"{"r":{"type":"string","x-mcp-header":7}}"#,
            r#"{"r":{"type":"number","x-mcp-header":"R"}}"#,
            r#"{"r":{"x-mcp-header":"R"}}"#,
            r#"{"r":{"items":{"type":"string","x-mcp-header":"R"}}}"#,
            r#"{"r":{"anyOf":[{"type":"string","x-mcp-header":"R"}]}}"#,
            r#"{"r":{"type":"string","x-mcp-header":"R"},"s":{"type":"string","x-mcp-header":"r"}}"#,
        ] {
            refused(&schema(bad), "x-mcp-header");
        }
        assert!(tools(&schema(r#"{"x-mcp-header":{"type":"string"},"e":{"enum":[{"x-mcp-header":1}]}}"#)).is_ok());
    }

    #[test]
    fn what_an_app_says_of_itself_is_bounded() {
        let parse = |member: &str, bytes: usize| {
            let text = "\u{e9}".repeat(bytes / 2) + &"x".repeat(bytes % 2);
            let device_id = if member == "device_id" { "" } else { r#""device_id":"d","# };
            Registration::parse(&format!(r#"{{{device_id}"{member}":"{text}"}}"#), &LIMITS)
        };
        for (member, most, limit) in [
            ("device_id", MAX_LABEL_BYTES, None),
            ("device_name", MAX_LABEL_BYTES, None),
            ("app_version", MAX_LABEL_BYTES, None),
            ("instructions", 50, Some(Limit::InstructionsBytes)),
        ] {
            assert!(parse(member, most).is_ok(), "{member}");
            let detail = format!("{member}: it takes {} bytes; the limit is {most}.", most + 1);
            assert_eq!(parse(member, most + 1).unwrap_err(), Rejected { detail, limit });
        }
    }

    #[test]
    fn a_registration_is_read_in_both_spellings() {
        let parse = |body: &str| Registration::parse(body, &LIMITS);
        let snake =
            parse(r#"{"device_id":"d","device_name":"n","tools":null,"bridge_features":["cancel","new"],"x":1}"#)
                .unwrap();
        assert_eq!((snake.spelling, snake.features.cancel, snake.features.resume), (Spelling::Snake, true, false));
        assert_eq!(snake.device_name.as_deref(), Some("n"));
        let camel = parse(r#"{"deviceId":"d","appVersion":"1","tools":[{"name":"a","inputSchema":{}}]}"#).unwrap();
        assert_eq!((camel.spelling, camel.tools.len(), camel.features.any()), (Spelling::Camel, 1, false));
        for (body, says) in [
            ("[]", "object"),
            ("{}", "device_id"),
            (r#"{"device_id":""}"#, "device_id"),
            (r#"{"device_id":7}"#, "device_id"),
            (r#"{"device_id":"a","deviceId":"b"}"#, "given twice"),
            (r#"{"device_id":"a","chat_id":1}"#, "chat_id"),
            (r#"{"device_id":"a","bridge_features":"cancel"}"#, "bridge_features"),
            (r#"{"device_id":"a","tools":{}}"#, "tools"),
        ] {
            assert!(parse(body).unwrap_err().detail.contains(says), "{body}");
        }
    }
}
