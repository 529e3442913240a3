// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
)

// card answers ethtool requests as a driver with everything does, by the rules that the kernel has before it asks one
// (net/ethtool/ioctl.c). No hardware with flow rules was at hand: the lab's igb offers none, and its igbvf has rings,
// coalescing and features only.
type card struct {
	rules map[uint32]bool
	// words are the structures without their first number, by the request that reads them.
	words     map[uint32][]uint32
	key       []byte
	table     []uint32
	ownTable  bool // it was set, and so is not spread anew with the channels
	function  byte
	fields    map[uint32]uint32
	available uint32
	requested uint32
	// refuse has an error for requests, and changed counts those that change something.
	refuse  map[uint32]error
	changed int
}

func newCard() *card {
	c := &card{
		rules: map[uint32]bool{3: true},
		words: map[uint32][]uint32{
			unix.ETHTOOL_GPFLAGS:     {1},
			unix.ETHTOOL_GCHANNELS:   {0, 0, 1, 8, 0, 0, 1, 4},
			unix.ETHTOOL_GRINGPARAM:  {4096, 0, 0, 4096, 512, 0, 0, 256},
			unix.ETHTOOL_GCOALESCE:   make([]uint32, 22),
			unix.ETHTOOL_GPAUSEPARAM: {0, 1, 1},
			unix.ETHTOOL_GMSGLVL:     {7},
		},
		key: bytes.Repeat([]byte{0x6d}, 40), table: make([]uint32, 128), function: 1,
		fields:    map[uint32]uint32{1: 0x30, 2: 0x30},
		available: 0b1110, requested: 0b0110, refuse: map[uint32]error{},
	}
	c.words[unix.ETHTOOL_GCOALESCE][0] = 8
	c.spread()
	return c
}

func (c *card) spread() {
	for i := range c.table {
		c.table[i] = uint32(i) % c.words[unix.ETHTOOL_GCHANNELS][7]
	}
	c.ownTable = false
}

var setters = map[uint32]uint32{
	unix.ETHTOOL_SPFLAGS: unix.ETHTOOL_GPFLAGS, unix.ETHTOOL_SCHANNELS: unix.ETHTOOL_GCHANNELS, unix.ETHTOOL_SRINGPARAM: unix.ETHTOOL_GRINGPARAM,
	unix.ETHTOOL_SCOALESCE: unix.ETHTOOL_GCOALESCE, unix.ETHTOOL_SPAUSEPARAM: unix.ETHTOOL_GPAUSEPARAM, unix.ETHTOOL_SMSGLVL: unix.ETHTOOL_GMSGLVL,
}

func (c *card) ask(data []byte) error {
	r := request(data)
	command := r.get(0)
	if err := c.refuse[command]; err != nil {
		return err
	}
	if words, ok := c.words[command]; ok {
		for i, word := range words {
			r.put(4+4*i, word)
		}
		return nil
	}
	get, sets := setters[command]
	if sets {
		words := make([]uint32, len(r)/4-1)
		for i := range words {
			words[i] = r.get(4 + 4*i)
		}
		if command == unix.ETHTOOL_SCHANNELS && (words[7] == 0 || words[7] > words[3] || c.ownTable && slices.Max(c.table) >= words[7]) {
			return unix.EINVAL
		}
		c.changed++
		c.words[get] = words
		if command == unix.ETHTOOL_SCHANNELS && !c.ownTable {
			c.spread()
		}
		return nil
	}
	switch command {
	case unix.ETHTOOL_GRXCLSRLCNT:
		r.put(rxnfcCount, uint32(len(c.rules)))
	case unix.ETHTOOL_GRXCLSRLALL:
		if r.get(rxnfcCount) < uint32(len(c.rules)) {
			return unix.EMSGSIZE
		}
		for i, location := range slices.Collect(maps.Keys(c.rules)) {
			r.put(rxnfcRules+4*i, location)
		}
		r.put(rxnfcCount, uint32(len(c.rules)))
	case unix.ETHTOOL_SRXCLSRLDEL:
		if !c.rules[r.get(rxnfcLocation)] {
			return unix.ENOENT
		}
		c.changed++
		delete(c.rules, r.get(rxnfcLocation))
	case unix.ETHTOOL_GRXFH, unix.ETHTOOL_SRXFH:
		fields, ok := c.fields[r.get(rxnfcFlowType)]
		if !ok {
			return unix.EINVAL
		}
		if command == unix.ETHTOOL_SRXFH {
			c.changed++
			c.fields[r.get(rxnfcFlowType)] = r.get(rxnfcData)
		} else {
			r.put(rxnfcData, fields)
		}
	case unix.ETHTOOL_GRSSH:
		if r.get(rxfhTableSize) == 0 {
			r.put(rxfhTableSize, uint32(len(c.table)))
			r.put(rxfhKeySize, uint32(len(c.key)))
			return nil
		}
		for i, queue := range c.table {
			r.put(rxfhTable+4*i, queue)
		}
		copy(r[rxfhTable+4*len(c.table):], c.key)
		r[rxfhFunction] = c.function
	case unix.ETHTOOL_SRSSH:
		c.changed++
		size := r.get(rxfhTableSize)
		key := r[rxfhTable:]
		switch size {
		case 0:
			c.spread()
		case tableUnchanged:
		default:
			for i := range c.table {
				c.table[i] = r.get(rxfhTable + 4*i)
			}
			key = r[rxfhTable+4*len(c.table):]
			c.ownTable = true
		}
		if r.get(rxfhKeySize) > 0 {
			copy(c.key, key)
		}
		if f := r[rxfhFunction]; f != 0 {
			c.function = f
		}
	case unix.ETHTOOL_GFEATURES:
		r.put(4, 2)
		r.put(8, c.available)
		r.put(12, c.requested|1) // one that cannot be changed is on
	case unix.ETHTOOL_SFEATURES:
		if r.get(4) != 2 {
			return unix.EINVAL
		}
		c.changed++
		valid := r.get(8) & c.available
		c.requested = c.requested&^valid | r.get(12)&valid
	default:
		return unix.EOPNOTSUPP
	}
	return nil
}

// read returns all that the card has.
func (c *card) read(t *testing.T) Settings {
	t.Helper()
	all := Settings{}
	for _, k := range settings {
		numbers, err := k.read(c.ask)
		if !isUnsupported(err) {
			require.NoError(t, err, k.name)
			all[k.name] = numbers
		}
	}
	// As it is when it comes back from a file.
	raw, err := json.Marshal(all)
	require.NoError(t, err)
	var back Settings
	require.NoError(t, json.Unmarshal(raw, &back))
	require.NoError(t, back.Validate())
	return back
}

func (c *card) putBack(want Settings) (errs []string) {
	for _, k := range settings {
		if want, known := want[k.name]; known {
			if err := k.putBack(c.ask, want); err != nil {
				errs = append(errs, k.name+": "+err.Error())
			}
		}
	}
	return errs
}

func TestSettingsComeBack(t *testing.T) {
	for name, change := range map[string]func(*card){
		"nothing":       func(*card) {},
		"flow rules":    func(c *card) { c.rules[0], c.rules[700] = true, true },
		"private flags": func(c *card) { c.words[unix.ETHTOOL_GPFLAGS][0] = 2 },
		"more channels": func(c *card) { c.words[unix.ETHTOOL_GCHANNELS][7] = 8; c.spread() },
		"channels and a table that needs them": func(c *card) {
			c.words[unix.ETHTOOL_GCHANNELS][7] = 8
			c.spread()
			c.table[5], c.ownTable = 7, true
		},
		"rings":         func(c *card) { c.words[unix.ETHTOOL_GRINGPARAM][4] = 64 },
		"coalescing":    func(c *card) { c.words[unix.ETHTOOL_GCOALESCE][0] = 3000 },
		"adaptive":      func(c *card) { c.words[unix.ETHTOOL_GCOALESCE][9] = 1 },
		"table":         func(c *card) { c.table[0], c.ownTable = 1, true },
		"key":           func(c *card) { c.key[39] = 1 },
		"hash":          func(c *card) { c.function = 2 },
		"hashed fields": func(c *card) { c.fields[2] = 0xf0 },
		"features":      func(c *card) { c.requested = 0b1000 },
		"pause":         func(c *card) { c.words[unix.ETHTOOL_GPAUSEPARAM][1] = 0 },
		"messages":      func(c *card) { c.words[unix.ETHTOOL_GMSGLVL][0] = 0xffff },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCard()
			before := c.read(t)
			change(c)
			after := c.read(t)
			require.Equal(t, name == "nothing", before.equal(after), "%v", after)
			c.changed = 0
			require.Empty(t, c.putBack(before))
			require.True(t, before.equal(c.read(t)), "%v", c.read(t))
			require.False(t, c.ownTable, "the driver spreads the table again")
			changed := c.changed
			if name == "nothing" {
				require.Zero(t, changed)
			}
			require.Empty(t, c.putBack(before))
			require.Equal(t, changed, c.changed, "what is as it was is not set")
		})
	}
}

func (s Settings) equal(other Settings) bool { return maps.EqualFunc(s, other, slices.Equal[[]uint32]) }

// A table that the host has set comes back as it was.
func TestTableOfTheHost(t *testing.T) {
	c := newCard()
	c.table[3], c.ownTable = 3, true
	c.table[4] = 3
	before := c.read(t)
	c.spread()
	require.Empty(t, c.putBack(before))
	require.True(t, before.equal(c.read(t)))
}

// Where the driver adapts to the traffic, what it came to is nobody's setting.
func TestAdaptedIsNotPutBack(t *testing.T) {
	c := newCard()
	c.words[unix.ETHTOOL_GCOALESCE][9] = 1
	c.words[unix.ETHTOOL_GPAUSEPARAM][0] = 1
	before := c.read(t)
	c.words[unix.ETHTOOL_GCOALESCE][0] = 50
	c.words[unix.ETHTOOL_GPAUSEPARAM][2] = 0
	c.changed = 0
	require.Empty(t, c.putBack(before))
	require.Zero(t, c.changed)
}

// What cannot be put back is an error that says what is the matter; the rest is put back all the same.
func TestSettingsThatStay(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*card)
		errs   []string
	}{
		"rule that stays": {
			func(c *card) { c.rules[9] = true; c.refuse[unix.ETHTOOL_SRXCLSRLDEL] = unix.EBUSY },
			[]string{"flow rules: delete rule 9, which a pod has left: device or resource busy\nit is [3 9] instead of [3]"},
		},
		"rule that cannot be deleted": {
			func(c *card) { c.rules[9] = true; c.refuse[unix.ETHTOOL_SRXCLSRLDEL] = unix.EOPNOTSUPP },
			[]string{"flow rules: delete rule 9, which a pod has left: operation not supported\nit is [3 9] instead of [3]"},
		},
		"rule of the host": {
			func(c *card) { delete(c.rules, 3) },
			[]string{"flow rules: rule 3, which the host had, is gone; add it again with ethtool --config-ntuple\nit is [] instead of [3]"},
		},
		"rules at all": {
			func(c *card) { c.refuse[unix.ETHTOOL_GRXCLSRLCNT] = unix.EOPNOTSUPP },
			[]string{"flow rules: the driver has none any more, and the host had [3]: operation not supported"},
		},
		"rings": {
			func(c *card) {
				c.words[unix.ETHTOOL_GRINGPARAM][4] = 64
				c.refuse[unix.ETHTOOL_SRINGPARAM] = unix.ENOMEM
			},
			[]string{"ring sizes: cannot allocate memory\nit is [64 0 0 256] instead of [512 0 0 256]"},
		},
		"reading": {
			func(c *card) { c.refuse[unix.ETHTOOL_GRINGPARAM] = unix.EIO },
			[]string{"ring sizes: input/output error"},
		},
		"unable":         {func(c *card) { c.words[unix.ETHTOOL_GMSGLVL][0] = 1; c.refuse[unix.ETHTOOL_SMSGLVL] = unix.EOPNOTSUPP }, nil},
		"another driver": {func(c *card) { c.refuse[unix.ETHTOOL_GRSSH] = unix.EOPNOTSUPP }, nil},
		"another table":  {func(c *card) { c.table = c.table[:64] }, []string{"receive hashing: the sizes of key and table are not what they were\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCard()
			before := c.read(t)
			tt.change(c)
			c.words[unix.ETHTOOL_GPAUSEPARAM][1] = 0
			got := c.putBack(before)
			if name == "another table" {
				require.Len(t, got, 1)
				require.Contains(t, got[0], tt.errs[0])
			} else {
				require.Equal(t, tt.errs, got)
			}
			require.EqualValues(t, 1, c.words[unix.ETHTOOL_GPAUSEPARAM][1], "what comes later is put back")
		})
	}
}

// Some drivers have flow rules only while a feature is on, which a pod may switch on.
func TestRulesOfAFeatureThatWasOff(t *testing.T) {
	c := newCard()
	c.refuse[unix.ETHTOOL_GRXCLSRLCNT] = unix.EOPNOTSUPP
	before, err := read(c.ask, "c0", slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.Equal(t, []uint32{}, before[flowRules.name])
	require.Empty(t, c.putBack(before))
	delete(c.refuse, unix.ETHTOOL_GRXCLSRLCNT)
	require.Empty(t, c.putBack(before))
	require.Empty(t, c.rules)
}

// Without its flow rules a NIC is not lent; another setting that cannot be read stays, and is told of.
func TestSettingsThatCannotBeRead(t *testing.T) {
	log := &testenv.LogBuffer{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	c := newCard()
	c.refuse[unix.ETHTOOL_GRINGPARAM] = unix.EIO
	s, err := read(c.ask, "c0", logger)
	require.NoError(t, err)
	require.NotContains(t, s, "ring sizes")
	require.Contains(t, s, "coalescing")
	require.Contains(t, log.String(), `setting="ring sizes"`)

	c.refuse[unix.ETHTOOL_GRXCLSRLCNT] = unix.EBUSY
	_, err = read(c.ask, "c0", logger)
	require.EqualError(t, err, `read the flow rules of link "c0": device or resource busy`)
	c = newCard()
	for i := range uint32(maxNumbers + 1) {
		c.rules[i] = true
	}
	_, err = read(c.ask, "c0", logger)
	require.EqualError(t, err, `link "c0" has 2201 flow rules; at most 2200 can be told from what a pod adds`)
}

func TestSettingsValidate(t *testing.T) {
	require.NoError(t, Settings{"of a later version": {1, 2}}.Validate())
	require.EqualError(t, Settings{"ring sizes": make([]uint32, maxNumbers+1)}.Validate(), `"ring sizes": 2201 numbers are more than 2200`)
	many := Settings{}
	for i := range maxSettings + 1 {
		many[string(rune('a'+i))] = nil
	}
	require.EqualError(t, many.Validate(), "65 settings are more than 64")
}

// Whatever a file has, putting it back ends, and no setting but those that the driver has are made.
func FuzzPutBack(f *testing.F) {
	f.Add([]byte(`{"flow rules":[1,2],"ring sizes":[1,2,3,4],"receive hashing":[1,0,40,128]}`))
	f.Add([]byte(`{"receive hashing":[1,0,4294967295,4294967295],"features":[1],"hashed fields":[7],"coalescing":[]}`))
	c := newCard()
	all := Settings{}
	for _, k := range settings {
		all[k.name], _ = k.read(c.ask)
	}
	raw, err := json.Marshal(all)
	require.NoError(f, err)
	f.Add(raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		var s Settings
		if json.Unmarshal(raw, &s) != nil || s.Validate() != nil {
			return
		}
		c := newCard()
		c.putBack(s)
		c.read(t)
	})
}

// veth has features, and as many channels as it was made with queues.
func TestSettingsOfVeth(t *testing.T) {
	host, pod := open(t, testenv.NetNS(t)), open(t, testenv.NetNS(t))
	ns, err := netns.GetFromPath(host.NS.Path)
	require.NoError(t, err)
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	defer handle.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.NumRxQueues, attrs.NumTxQueues = "v0", 4, 4
	require.NoError(t, handle.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "v1", PeerNumRxQueues: 4, PeerNumTxQueues: 4}))
	link, err := host.ByName("v0")
	require.NoError(t, err)
	id := Identity{Kind: "veth", MAC: link.Attrs().HardwareAddr.String(), Index: link.Attrs().Index, Name: "v0"}

	before, err := host.Settings(link)
	require.NoError(t, err)
	require.Contains(t, before, features.name)
	require.Contains(t, before, channels.name)
	require.Empty(t, before[flowRules.name], "veth has none")

	send(t, host, pod, id, "net1")
	inPod, err := pod.Find(id, nil)
	require.NoError(t, err)
	changed := maps.Clone(before)
	changed[channels.name] = []uint32{2, 2, 0, 0}
	changed[features.name] = slices.Clone(before[features.name])
	for i := 1; i < len(changed[features.name]); i += 2 {
		changed[features.name][i] = 0
	}
	require.NoError(t, pod.PutBack(inPod, changed), "as a pod does")

	home, err := host.Fetch(t.Context(), Search{ID: id, Want: Read(link), Named: []string{pod.NS.Path}})
	require.NoError(t, err)
	left, err := host.Settings(home)
	require.NoError(t, err)
	require.False(t, before.equal(left), "the kernel does not reset them")
	require.NoError(t, host.PutBack(home, before))
	after, err := host.Settings(home)
	require.NoError(t, err)
	require.Equal(t, before, after)

	// A request goes by the name, and that may be another link's by now.
	other := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "v0", Index: 4711}}
	_, err = host.Settings(other)
	require.EqualError(t, err, `link "v0" was renamed or moved while its settings were read`)
	require.EqualError(t, host.PutBack(other, before), `link "v0" was renamed or moved`)
}

func BenchmarkSettings(b *testing.B) {
	host, err := Open(slog.New(slog.DiscardHandler), testenv.NetNS(b), "")
	require.NoError(b, err)
	defer host.Close()
	require.NoError(b, host.Add("veth", "v0", 0))
	link, err := host.ByName("v0")
	require.NoError(b, err)
	var s Settings
	b.Run("Read", func(b *testing.B) {
		for b.Loop() {
			s, err = host.Settings(link)
			require.NoError(b, err)
		}
	})
	b.Run("PutBack", func(b *testing.B) {
		for b.Loop() {
			require.NoError(b, host.PutBack(link, s))
		}
	})
}
