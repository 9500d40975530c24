// Draws A2UI surfaces. Data becomes text and properties, never markup; what the user enters and presses is reported.
globalThis.openclawA2ui ??= (() => {
  'use strict';

  const MAX_DEPTH = 64;
  // A few components that repeat each other could otherwise make any number.
  const MAX_NODES = 20000;
  const ICONS = {
    accountCircle: '👤', add: '＋', arrowBack: '←', arrowForward: '→', attachFile: '📎', calendarToday: '📅', call: '📞',
    camera: '📷', check: '✓', close: '✕', delete: '🗑', download: '⬇', edit: '✎', event: '📅', error: '⛔', favorite: '♥',
    favoriteOff: '♡', folder: '📁', help: '?', home: '⌂', info: 'ℹ', locationOn: '📍', lock: '🔒', lockOpen: '🔓',
    mail: '✉', menu: '☰', moreVert: '⋮', moreHoriz: '⋯', notificationsOff: '🔕', notifications: '🔔', payment: '💳',
    person: '👤', phone: '📱', photo: '🖼', print: '🖨', refresh: '↻', search: '🔍', send: '➤', settings: '⚙', share: '↗',
    shoppingCart: '🛒', star: '★', starHalf: '⯪', starOff: '☆', upload: '⬆', visibility: '👁', visibilityOff: '⊘',
    warning: '⚠',
  };
  const DISTRIBUTION = {
    start: 'flex-start', center: 'center', end: 'flex-end', spaceBetween: 'space-between', spaceAround: 'space-around',
    spaceEvenly: 'space-evenly',
  };
  const ALIGNMENT = { start: 'flex-start', center: 'center', end: 'flex-end', stretch: 'stretch' };

  // What is chosen on the screen alone: the tab of tabs.
  const chosen = new Map();
  // Bring what is drawn up to date with the data, one each.
  let updates = [];
  let nodes = 0;

  const report = what => globalThis.openclawReport(JSON.stringify(what));
  const isObject = value => typeof value === 'object' && value !== null;
  const segments = path => path.split('/').filter(Boolean);

  function read(model, path) {
    let value = model;
    for (const segment of segments(path)) {
      if (!isObject(value) || !Object.hasOwn(value, segment)) return undefined;
      value = value[segment];
    }
    return value;
  }

  function write(model, path, value) {
    const names = segments(path);
    const last = names.pop();
    if (last === undefined) return;
    const put = (object, name, member) =>
      Object.defineProperty(object, name, { value: member, writable: true, enumerable: true, configurable: true });
    for (const name of names) {
      if (!Object.hasOwn(model, name) || !isObject(model[name])) put(model, name, {});
      model = model[name];
    }
    put(model, last, value);
  }

  // A place of the tree: its surface, the data that relative paths begin at, its depth, and a key that is its own.
  const absolute = (place, path) =>
    path.startsWith('/') ? path : path === '' || path === '.' ? place.data || '/' : `${place.data}/${path}`;

  function value(place, bound) {
    if (!isObject(bound)) return bound;
    const known = typeof bound.path === 'string' ? read(place.surface.dataModel, absolute(place, bound.path)) : undefined;
    return known ?? bound.literalString ?? bound.literalNumber ?? bound.literalBoolean ?? bound.literalArray ?? bound.literal;
  }

  function text(place, bound) {
    const known = value(place, bound) ?? '';
    return isObject(known) ? JSON.stringify(known) : String(known);
  }

  function set(place, bound, entered) {
    if (!isObject(bound) || typeof bound.path !== 'string') return;
    const path = absolute(place, bound.path);
    write(place.surface.dataModel, path, entered);
    report({ data: { surfaceId: place.surface.surfaceId, path, value: entered } });
    refresh();
  }

  function refresh() {
    for (const update of updates) update();
  }

  function live(update) {
    updates.push(update);
    update();
  }

  function element(name, className, ...children) {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...children.filter(Boolean));
    return made;
  }

  function textElement(name, className, place, bound) {
    const made = element(name, className);
    live(() => { made.textContent = text(place, bound); });
    return made;
  }

  // An input whose value is `bound`; what somebody is typing into is left alone.
  function input(made, place, property, bound, toShown, toData) {
    made.dataset.key = place.key;
    live(() => {
      if (made !== document.activeElement || typeof made[property] === 'boolean') made[property] = toShown(value(place, bound));
    });
    made.addEventListener('input', () => set(place, bound, toData(made[property])));
    return made;
  }

  function children(place, spec) {
    if (Array.isArray(spec?.explicitList)) return spec.explicitList.map((id, index) => draw(place, id, place.data, index));
    if (!isObject(spec?.template)) return [];
    const path = absolute(place, String(spec.template.dataBinding ?? ''));
    const data = read(place.surface.dataModel, path);
    const names = isObject(data) ? Object.keys(data) : [];
    return names.map(name => draw(place, spec.template.componentId, `/${[...segments(path), name].join('/')}`, name));
  }

  function flex(className, place, { children: spec, distribution, alignment }) {
    const made = element('div', className, ...children(place, spec));
    made.style.justifyContent = DISTRIBUTION[distribution] ?? '';
    made.style.alignItems = ALIGNMENT[alignment] ?? '';
    return made;
  }

  const field = (place, label, control) => element('label', 'field', textElement('span', '', place, label), control);

  const draws = {
    Text: (place, { text: bound, usageHint }) =>
      textElement(/^h[1-5]$/.test(usageHint) ? usageHint : 'p', usageHint === 'caption' ? 'text caption' : 'text', place, bound),
    Image(place, { url, fit, usageHint }) {
      const made = element('img', /^\w+$/.test(usageHint) ? usageHint : '');
      made.alt = '';
      made.style.objectFit = fit ?? '';
      live(() => { if (made.getAttribute('src') !== text(place, url)) made.src = text(place, url); });
      return made;
    },
    Icon(place, { name }) {
      const made = element('span', 'icon');
      live(() => {
        const known = text(place, name);
        made.textContent = Object.hasOwn(ICONS, known) ? ICONS[known] : known;
        made.title = known;
      });
      return made;
    },
    Video(place, { url }) {
      const made = element('video');
      made.controls = true;
      live(() => { if (made.getAttribute('src') !== text(place, url)) made.src = text(place, url); });
      return made;
    },
    AudioPlayer(place, { url, description }) {
      const made = element('audio');
      made.controls = true;
      live(() => { if (made.getAttribute('src') !== text(place, url)) made.src = text(place, url); });
      return element('div', 'column', description && textElement('span', '', place, description), made);
    },
    Row: (place, properties) => flex('row', place, properties),
    Column: (place, properties) => flex('column', place, properties),
    List: (place, properties) =>
      flex(properties.direction === 'horizontal' ? 'list horizontal' : 'list', place, properties),
    Card: (place, { child }) => element('div', 'card', draw(place, child, place.data)),
    Divider: (_, { axis }) => element('hr', axis === 'vertical' ? 'divider vertical' : 'divider'),
    Tabs(place, { tabItems }) {
      const items = Array.isArray(tabItems) ? tabItems : [];
      const panels = items.map((item, index) => element('div', '', draw(place, item?.child, place.data, index)));
      const titles = items.map((item, index) => {
        const title = textElement('button', '', place, item?.title);
        title.setAttribute('role', 'tab');
        title.addEventListener('click', () => choose(index));
        return title;
      });
      const choose = index => {
        chosen.set(place.key, index);
        titles.forEach((title, other) => title.setAttribute('aria-selected', other === index));
        panels.forEach((panel, other) => { panel.hidden = other !== index; });
      };
      choose(Math.min(chosen.get(place.key) ?? 0, Math.max(items.length - 1, 0)));
      return element('div', 'tabs', element('div', 'titles', ...titles), ...panels);
    },
    Modal(place, { entryPointChild, contentChild }) {
      const close = element('button', 'close', '✕');
      const dialog = element('dialog', '', close, draw(place, contentChild, place.data, 'content'));
      const entry = element('div', '', draw(place, entryPointChild, place.data, 'entry'));
      entry.addEventListener('click', () => dialog.showModal());
      close.addEventListener('click', () => dialog.close());
      return element('div', '', entry, dialog);
    },
    Button(place, { child, primary, action }) {
      const made = element('button', primary === true ? 'primary' : '', draw(place, child, place.data));
      made.addEventListener('click', () => {
        const context = {};
        for (const entry of Array.isArray(action?.context) ? action.context : []) {
          write(context, `/${entry?.key ?? ''}`, value(place, entry?.value) ?? null);
        }
        const { surfaceId } = place.surface;
        const name = String(action?.name ?? '');
        const timestamp = new Date().toISOString();
        report({ userAction: { name, surfaceId, sourceComponentId: place.id, timestamp, context } });
      });
      return made;
    },
    CheckBox(place, { label, value: bound }) {
      const made = element('input');
      made.type = 'checkbox';
      input(made, place, 'checked', bound, Boolean, Boolean);
      return element('label', 'choice', made, textElement('span', '', place, label));
    },
    TextField(place, { label, text: bound, textFieldType, validationRegexp }) {
      const made = element(textFieldType === 'longText' ? 'textarea' : 'input');
      if (textFieldType !== 'longText') {
        made.type = { date: 'date', number: 'number', obscured: 'password' }[textFieldType] ?? 'text';
        if (typeof validationRegexp === 'string') made.pattern = validationRegexp;
      }
      return field(place, label, input(made, place, 'value', bound, known => String(known ?? ''), String));
    },
    DateTimeInput(place, { value: bound, enableDate, enableTime, label }) {
      const made = element('input');
      made.type = enableTime !== true ? 'date' : enableDate === false ? 'time' : 'datetime-local';
      const length = { date: 10, time: 5, 'datetime-local': 16 }[made.type];
      return field(place, label ?? '', input(made, place, 'value', bound, known => String(known ?? '').slice(0, length), String));
    },
    MultipleChoice(place, { selections, options, maxAllowedSelections, label }) {
      const most = maxAllowedSelections ?? Infinity;
      const selected = () => {
        const known = value(place, selections);
        return Array.isArray(known) ? known.map(String) : isObject(known) ? Object.values(known).map(String) : known ? [String(known)] : [];
      };
      const choices = (Array.isArray(options) ? options : []).map((option, index) => {
        const made = element('input');
        made.type = most === 1 ? 'radio' : 'checkbox';
        made.name = place.key;
        made.dataset.key = `${place.key}/${index}`;
        const own = String(option?.value ?? '');
        live(() => {
          made.checked = selected().includes(own);
          made.disabled = most !== 1 && !made.checked && selected().length >= most;
        });
        made.addEventListener('change', () => {
          const others = most === 1 ? [] : selected().filter(other => other !== own);
          set(place, selections, made.checked ? [...others, own] : others);
        });
        return element('label', 'choice', made, textElement('span', '', place, option?.label));
      });
      return element('fieldset', '', label && textElement('legend', '', place, label), ...choices);
    },
    Slider(place, { value: bound, minValue, maxValue, label }) {
      const made = element('input');
      made.type = 'range';
      made.min = minValue ?? 0;
      made.max = maxValue ?? 100;
      made.step = 'any';
      input(made, place, 'value', bound, known => Number(known ?? 0), Number);
      return field(place, label ?? bound, made);
    },
  };

  function draw(parent, id, data, branch = '') {
    const { surface } = parent;
    const known = surface.byId.get(id);
    if (!known || parent.depth >= MAX_DEPTH || ++nodes > MAX_NODES) return null;
    const [[kind, properties]] = Object.entries(known.component);
    const place = { surface, data, id, depth: parent.depth + 1, key: `${parent.key}/${branch}:${id}` };
    const made = Object.hasOwn(draws, kind)
      ? draws[kind](place, properties)
      : element('div', 'unknown', `${kind} is not supported`);
    made.dataset.component = id;
    if (typeof known.weight === 'number') {
      made.style.flexGrow = known.weight;
      made.style.flexBasis = '0';
    }
    return made;
  }

  function drawSurface(surface) {
    if (surface.root === null) return null;
    surface.byId = new Map(surface.components.map(component => [component.id, component]));
    nodes = 0;
    const made = element('section', 'surface', draw({ surface, data: '', depth: 0, key: surface.surfaceId }, surface.root, ''));
    made.dataset.surface = surface.surfaceId;
    const { font, primaryColor } = surface.styles ?? {};
    if (typeof font === 'string') made.style.fontFamily = font;
    if (/^#[0-9a-f]{6}$/i.test(primaryColor)) made.style.setProperty('--primary', primaryColor);
    return made;
  }

  // Draws everything anew, and puts the cursor back where it was.
  function show(state) {
    const { dataset, selectionStart, selectionEnd } = document.activeElement ?? {};
    updates = [];
    document.body.replaceChildren(...JSON.parse(state).map(drawSurface).filter(Boolean));
    const again = dataset?.key && [...document.querySelectorAll('[data-key]')].find(made => made.dataset.key === dataset.key);
    if (!again) return;
    again.focus();
    if (typeof selectionStart === 'number') again.setSelectionRange?.(selectionStart, selectionEnd);
  }

  return { show };
})();
