// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package cdi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/gatehook"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/pkg/statedir"
)

// repairInterval is how long a file may be other than it shall be, if that can be helped.
const repairInterval = 10 * time.Second

// createRuntime is when the hook runs: the container has its namespaces, and nothing of it has started.
const createRuntime = "createRuntime"

// Params are what [Files] work with.
type Params struct {
	Logger *slog.Logger
	// Folder is where the runtime reads CDI spec files. It need not be there.
	Folder string
	// Driver is the driver's name.
	Driver string
	// Hook is the program of package gatehook, by its path on the node, which has to be the agent's too; empty for none.
	Hook string
	// Places is the folder with what the hook is told, on the node.
	Places string
}

// Files are the CDI spec files of a driver's claims in one folder, one for each claim whose gate is open.
type Files struct {
	Params
	vendor string

	mu sync.Mutex // guards the fields below, and the files
	// open are the gates that shall be open.
	open map[kubetypes.UID]*opening
	// failed is why a file is not as it shall be.
	failed map[kubetypes.UID]error
	// unhooked is why containers start without the hook that they shall have.
	unhooked error
	// resolved is true when the runtime was seen to read the files, unresolved is set when it was seen not to.
	resolved   bool
	unresolved error
	changed    chan struct{} // closed when one of the four changes
}

// opening is a gate that is open, with what its files contain.
type opening struct {
	plain, hooked, place []byte
}

// NewFiles returns the files of the driver's claims.
func NewFiles(p Params) *Files {
	return &Files{
		Params: p, vendor: vendor(p.Driver),
		open: map[kubetypes.UID]*opening{}, failed: map[kubetypes.UID]error{}, changed: make(chan struct{}),
	}
}

// Gate is what is to be let through to a claim: containers that list one of its requests, and are in the sandbox that the
// claim's devices are in.
type Gate struct {
	Claim    kubetypes.UID
	Requests []string
	// Sandbox is the runtime's name of the sandbox, and NetNS the path of its network namespace.
	Sandbox, NetNS string
	// Exposed are the devices that programs open themselves.
	Exposed []Exposed
	// Hardware are the claim's devices that have one interface each, which is in the sandbox.
	Hardware []gatehook.Device
	// ClaimName and Pod are the namespaces and names of the claim and of the pod that has its devices, for people.
	ClaimName, Pod string
}

// Exposed is a device that a program opens itself, with the request that it is of.
type Exposed struct {
	Request string
	// PodClaim is what the pod calls the claim: its name there, or the extended resource that the pod asks for instead of a claim.
	PodClaim string
	types.Exposure
}

// OpenGate lets containers start that list one of the claim's requests, and marks them with the sandbox that the devices
// are in. When it fails, [Files.Repair] tries again until [Files.CloseGate].
func (f *Files) OpenGate(g Gate) error {
	o, err := f.contents(g)
	if err != nil {
		f.CloseGate(g.Claim)
		return fmt.Errorf("CDI spec of claim %s: %w", g.Claim, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.findHook()
	f.open[g.Claim] = o
	crashpoint.Here(crashpoint.CDIBefore)
	err = f.write(g.Claim, o)
	crashpoint.Here(crashpoint.CDIAfter)
	return f.note(g.Claim, err)
}

// CloseGate holds back containers that list the claim from now on. A failure is kept for [Files.State], and
// [Files.Repair] tries again: it is no reason to leave devices where they are.
func (f *Files) CloseGate(claim kubetypes.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.open, claim)
	_ = f.note(claim, f.remove(claim))
}

// WasOpened says whether the claim's file lets containers of the sandbox start, which a former agent may have written.
func (f *Files) WasOpened(claim kubetypes.UID, sandbox string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	content, err := os.ReadFile(f.path(claim))
	if err != nil {
		return false
	}
	spec := specs.Spec{}
	if err := json.Unmarshal(content, &spec); err != nil {
		return false
	}
	return slices.ContainsFunc(spec.Devices, func(d specs.Device) bool {
		return slices.Contains(MarkersIn(d.ContainerEdits.Env), Marker{claim, sandbox})
	})
}

// CloseOtherGates closes those of all claims but the given ones. They are what an agent left that was ended, or an earlier
// boot of a node whose folder outlives it.
func (f *Files) CloseOtherGates(claims []kubetypes.UID) {
	prefix, suffix, _ := strings.Cut(filepath.Base(f.path("*")), "*")
	left := append(f.claimsIn(f.Folder, prefix, suffix), f.claimsIn(f.Places, "", gatehook.Suffix)...)
	for _, claim := range left {
		if !slices.Contains(claims, claim) {
			f.CloseGate(claim)
		}
	}
}

// claimsIn returns the claims of the files in a folder.
func (f *Files) claimsIn(folder, prefix, suffix string) (claims []kubetypes.UID) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.Logger.Error("CDI spec files that a former agent may have left cannot be looked for", "error", err)
	}
	for _, entry := range entries {
		claim, ours := strings.CutPrefix(entry.Name(), prefix)
		claim, isSpec := strings.CutSuffix(claim, suffix)
		// Of a driver whose name is ours and this class, kubeletplugin has its own files.
		if ours && isSpec && !strings.HasPrefix(claim, "metadata_") {
			claims = append(claims, kubetypes.UID(claim))
		}
	}
	return claims
}

// ReadMarkers returns the markers in a container's environment. A container with a CDI device of the driver and without
// a marker is a sign that the runtime does not resolve CDI devices, and is kept for [Files.State] until there is
// another.
func (f *Files) ReadMarkers(environment, devices []string) []Marker {
	markers := MarkersIn(environment)
	kind := parser.QualifiedName(f.vendor, class, "")
	if len(markers) == 0 && !slices.ContainsFunc(devices, func(id string) bool { return strings.HasPrefix(id, kind) }) {
		return nil
	}
	var err error
	if len(markers) == 0 {
		err = errors.New("the container runtime does not resolve CDI devices, so that containers may start without the devices of " +
			"their pod while the agent is away, and see no metadata of them: enable CDI in the runtime (containerd 1.7: enable_cdi = true, and cdi_spec_dirs)")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if resolved := err == nil; resolved != f.resolved || resolved != (f.unresolved == nil) {
		f.resolved, f.unresolved = resolved, err
		f.notify()
	}
	return markers
}

// Run has the files repaired from time to time, until the context ends.
func (f *Files) Run(ctx context.Context) error {
	f.Repair() // says at once what is wrong
	for pause.For(ctx, repairInterval) {
		f.Repair()
	}
	return nil
}

// Repair makes the files what they shall be: some could not be written or removed, and others may have been removed by
// somebody else.
func (f *Files) Repair() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.findHook()
	for claim := range maps.Clone(f.failed) {
		if _, open := f.open[claim]; !open {
			_ = f.note(claim, f.remove(claim))
		}
	}
	for claim, o := range f.open {
		_ = f.note(claim, f.write(claim, o))
	}
}

// State is how the gate is doing.
type State struct {
	// Resolved says that the runtime was seen to resolve CDI devices. Runtimes with NRI older than 0.10 do not say which
	// devices a container was to have, so that one which resolves none is not told from one that was not asked to.
	Resolved bool
	// Problem is why the gate does not hold or does not open, nil if it does.
	Problem error
}

// State returns the present state, and a channel that is closed when there is another.
func (f *Files) State() (State, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	errs := []error{f.unresolved, f.unhooked}
	for _, claim := range slices.Sorted(maps.Keys(f.failed)) {
		errs = append(errs, f.failed[claim])
	}
	return State{f.resolved, errors.Join(errs...)}, f.changed
}

// note keeps what became of a claim's file, and returns it.
func (f *Files) note(claim kubetypes.UID, err error) error {
	before := f.failed[claim]
	switch {
	case err == nil && before == nil, err != nil && before != nil && err.Error() == before.Error():
		return err
	case err == nil:
		delete(f.failed, claim)
		f.Logger.Info("CDI spec file is as it shall be again", "file", f.path(claim))
	default:
		f.failed[claim] = err
		f.Logger.Error("CDI spec file of a claim is not as it shall be, it is tried again", "file", f.path(claim), "error", err)
	}
	f.notify()
	return err
}

func (f *Files) notify() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// path is the claim's file, named as CDI names those that come and go.
func (f *Files) path(claim kubetypes.UID) string {
	return filepath.Join(f.Folder, f.vendor+"-"+class+"_"+fileName(claim)+".json")
}

// fileName is the claim's UID as it may be a part of a path.
func fileName(claim kubetypes.UID) string { return strings.ReplaceAll(string(claim), "/", "_") }

// findHook looks whether the hook is where the runtime will look for it: a container whose hook is missing does not start at
// all. It needs the lock.
func (f *Files) findHook() {
	if f.Hook == "" {
		return
	}
	info, err := os.Lstat(f.Hook)
	if err == nil && (!info.Mode().IsRegular() || info.Mode()&0o100 == 0) {
		err = fmt.Errorf("%s is not a program (%s)", f.Hook, info.Mode())
	}
	if err != nil {
		err = fmt.Errorf("the gate hook is not in place, so that while the agent is away containers of another pod of a claim, or of a "+
			"sandbox that is made anew, may start without its devices: %w", err)
	}
	switch {
	case err == nil && f.unhooked == nil, err != nil && f.unhooked != nil && err.Error() == f.unhooked.Error():
		return
	case err == nil:
		f.Logger.Info("The gate hook is in place again", "file", f.Hook)
	default:
		f.Logger.Error("The gate hook is not in place, containers start without it", "error", err)
	}
	f.unhooked = err
	f.notify()
}

// placePath is the file that the hook reads.
func (f *Files) placePath(claim kubetypes.UID) string {
	return filepath.Join(f.Places, fileName(claim)+gatehook.Suffix)
}

// contents makes what the files of a claim have in them.
func (f *Files) contents(g Gate) (o *opening, err error) {
	o = &opening{}
	edits := specs.ContainerEdits{}
	if f.Hook != "" {
		ns, err := netnamespace.Open(g.NetNS)
		if err != nil {
			return nil, err
		}
		ns.Close()
		if o.place, err = json.Marshal(gatehook.Place{NetNS: ns.ID, Sandbox: g.Sandbox, Hardware: g.Hardware, Claim: g.ClaimName, Pod: g.Pod}); err != nil {
			return nil, err
		}
		args := []string{f.Hook, f.placePath(g.Claim)}
		for _, e := range g.Exposed {
			if e.IOMMUGroup != nil {
				args = append(args, gatehook.Group{Device: e.Address, Number: *e.IOMMUGroup}.String())
			}
		}
		edits.Hooks = []*specs.Hook{{HookName: createRuntime, Path: f.Hook, Args: args, Timeout: new(gatehook.Timeout)}}
		if o.hooked, err = f.spec(g, edits); err != nil {
			return nil, err
		}
	}
	o.plain, err = f.spec(g, specs.ContainerEdits{})
	return o, err
}

// spec has a device for each request, as a container may list one only. What is common to them is done once for a container.
func (f *Files) spec(g Gate, common specs.ContainerEdits) ([]byte, error) {
	spec := &specs.Spec{Kind: f.vendor + "/" + class, ContainerEdits: common}
	var names []string
	for _, request := range g.Requests {
		names = append(names, deviceName(g.Claim, request))
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if _, _, _, err := parser.ParseQualifiedName(parser.QualifiedName(f.vendor, class, name)); err != nil {
			return nil, err
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: g.edits(name)})
	}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err != nil {
		return nil, err
	}
	return json.Marshal(spec)
}

// edits are those of the containers that list the request of the device. Who owns the nodes in a container is left to the runtime,
// which makes them the container's user's.
func (g Gate) edits(device string) specs.ContainerEdits {
	edits := specs.ContainerEdits{Env: []string{Marker{g.Claim, g.Sandbox}.variable()}}
	var addresses, nodes []string
	variable := ""
	for _, e := range g.Exposed {
		if deviceName(g.Claim, e.Request) == device {
			addresses, nodes = append(addresses, e.Address), append(nodes, e.Nodes...)
			variable = addressVariable(e.PodClaim, device[len(g.Claim)+1:])
		}
	}
	if len(addresses) > 0 {
		edits.Env = append(edits.Env, variable+"="+strings.Join(addresses, ","))
	}
	slices.Sort(nodes)
	for _, node := range slices.Compact(nodes) {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: node, Permissions: "rw"})
	}
	return edits
}

// write makes the files of a claim what they shall be: what the hook reads is there before a runtime is told of the hook.
func (f *Files) write(claim kubetypes.UID, o *opening) error {
	content := o.plain
	if o.hooked != nil && f.unhooked == nil {
		content = o.hooked
		if err := f.writePlace(f.placePath(claim), o.place); err != nil {
			return fmt.Errorf("write what the gate hook reads: %w", err)
		}
	}
	return f.writeSpec(f.path(claim), content)
}

func (f *Files) writePlace(path string, content []byte) error {
	if present, err := statedir.Read(path, int64(len(content))+1); err == nil && bytes.Equal(present, content) {
		return nil
	}
	if err := statedir.Make(f.Places); err != nil {
		return err
	}
	return statedir.Write(path, content)
}

// writeSpec replaces the file at once. One that is right already is left alone, since runtimes read the whole folder anew at
// each change.
func (f *Files) writeSpec(path string, content []byte) error {
	if present, err := os.ReadFile(path); err == nil && bytes.Equal(present, content) {
		return nil
	}
	if err := os.MkdirAll(f.Folder, 0o755); err != nil {
		return fmt.Errorf("make the folder of CDI spec files: %w", err)
	}
	next := path + ".next" // CDI reads files by their suffix
	err := os.WriteFile(next, content, 0o644)
	if err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		_ = os.Remove(next)
		return fmt.Errorf("write CDI spec file: %w", err)
	}
	return nil
}

// remove closes the gate first. A container for which the runtime has read the spec before then finds nothing.
func (f *Files) remove(claim kubetypes.UID) error {
	if err := os.Remove(f.path(claim)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove CDI spec file: %w", err)
	}
	if err := statedir.Remove(f.placePath(claim)); err != nil {
		return fmt.Errorf("remove what the gate hook reads: %w", err)
	}
	return nil
}
