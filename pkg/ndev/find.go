// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// Finding is something that is not as it should be, in words.
type Finding struct {
	// What is missing or wrong.
	What string `json:"what"`
	// Do is what to do about it.
	Do string `json:"do"`
	// See is the page and section of the documentation that says more.
	See string `json:"see,omitempty"`
}

// Sections of the documentation that findings point to.
const (
	seePending     = "troubleshoot.md#pod-stays-pending"
	seeCreating    = "troubleshoot.md#pod-stays-in-containercreating"
	seePrepare     = "troubleshoot.md#from-prepare-failedpreparedynamicresources"
	seeNoInterface = "troubleshoot.md#pod-runs-but-has-no-interface"
	seeNoDevices   = "troubleshoot.md#no-devices-in-the-slices"
	seeCondition   = "troubleshoot.md#by-condition"
	seeAgent       = "troubleshoot.md#agent-is-not-ready"
	seeGate        = "troubleshoot.md#the-container-gate"
	seeHealth      = "troubleshoot.md#a-device-is-unhealthy"
	seeTerminating = "troubleshoot.md#pod-stays-in-terminating"
	seeShared      = "use.md#one-pod-per-claim"
	seeGroup       = "use.md#pod-groups"
	seeNever       = "use.md#never-run-without-the-device"
	seeNetworks    = "use.md#networks"
)

func (t *teller) missing(see, do, what string, args ...any) {
	t.Missing = append(t.Missing, Finding{What: fmt.Sprintf(what, args...), Do: do, See: see})
}

// find fills in what is missing, in the order in which a pod meets it.
func (t *teller) find() {
	if len(t.Claims) == 0 {
		t.missing("use.md#3-a-pod", "name a claim or a claim template in spec.resourceClaims, and the claim in a container's resources.claims",
			"the pod asks for no device: it has no claim")
		return
	}
	if t.pod.DeletionTimestamp != nil {
		t.missing(seeTerminating, "if it lasts, see the events below and the agent's log", "the pod is being deleted")
	}
	ours := false
	for i := range t.Claims {
		ours = t.findInClaim(&t.Claims[i]) || ours
	}
	if ours {
		t.findOnNode()
		t.findInNetworks()
	}
}

// findInClaim says whether the claim has to do with the driver.
func (t *teller) findInClaim(state *ClaimState) bool {
	claim := t.claims[state.PodClaim]
	switch {
	case claim == nil && t.noTemplate[state.PodClaim]:
		t.missing(seePending, "create it in namespace "+t.pod.Namespace+", or delete the pod and correct the name",
			"claim %s: there is no claim template %s", state.PodClaim, state.Template)
		return false
	case claim == nil && state.Name == "":
		t.missing(seePending, "if it stays so, see the events, and whether an admission policy refuses the claim",
			"claim %s: Kubernetes has not made it from template %s yet", state.PodClaim, state.Template)
		return false
	case claim == nil:
		t.missing(seePending, "create it in namespace "+t.pod.Namespace, "claim %s: there is no ResourceClaim %s", state.PodClaim, state.Name)
		return false
	}
	if claim.Status.Allocation == nil {
		return t.findUnallotted(state, claim)
	}
	ours := slices.ContainsFunc(state.Devices, func(d Device) bool { return t.isOurs(d.Driver) })
	if !ours {
		return false
	}
	t.findForeignParameters(state)
	if len(state.Containers) == 0 {
		t.missing(seeNever, "list it under resources.claims of the containers that need the device",
			"claim %s: no container lists it, so that nothing keeps a container from starting without the device", state.PodClaim)
	}
	t.findReservation(state, claim)
	for i := range state.Devices {
		if d := &state.Devices[i]; t.isOurs(d.Driver) {
			t.findInDevice(state, d)
		}
	}
	return true
}

// findUnallotted says why the scheduler may not have found devices.
func (t *teller) findUnallotted(state *ClaimState, claim *resourceapi.ResourceClaim) bool {
	ours := false
	for _, r := range state.Requests {
		o := r.Offered
		of := fmt.Sprintf("claim %s, request %s", state.PodClaim, r.Name)
		switch {
		case o == nil: // could not be read, which is said elsewhere
		case o.NoClass:
			t.missing(seePending, "create it, or correct the name in the claim's template and delete the pod", "%s: there is no DeviceClass %s",
				of, r.Class)
		case o.Error != "":
			t.missing(seePending,
				`correct the selector of the class or claim; ask "x" in device.attributes[...] before an attribute that some devices lack`,
				"%s: a selector cannot be used, %s", of, o.Error)
		case o.All == 0:
			t.missing(seeNoDevices, "see whether the nodes have a NodeConfig and are Ready: kubectl get ndnc", "%s: no node offers any device", of)
		case o.Matching == 0:
			t.missing(seePending, "compare the selectors of class and claim with what there is: kubectl ndev -o wide. If the class is for "+
				"devices of another driver, ask that one",
				"%s: class %s matches none of the network driver's %d devices", of, r.Class, o.All)
		case o.Free == 0:
			ours = true
			t.missing(seePending, "wait for a device to become free, add devices or nodes, or see who has them: kubectl ndev. For tainted ones: "+
				"kubectl ndev --unhealthy",
				"%s: none of the %d matching devices is free, claims have %d of them, and taints keep %d from new claims", of, o.Matching, o.InUse,
				o.Tainted)
		case r.Count > int64(o.Free):
			ours = true
			t.missing(seePending, "ask for fewer, add devices or nodes, or see who has them: kubectl ndev",
				"%s: it asks for %d devices, and %d matching ones are free", of, r.Count, o.Free)
		default:
			ours = true
			t.missing(seePending, "see what else the pod asks of a node (nodeSelector, affinity, CPU, memory, several devices of one node), in "+
				"the message of the scheduler",
				"%s: the scheduler has not allotted any of %d free matching devices on %d nodes", of, o.Free, o.FreeOn)
		}
	}
	return ours
}

// findForeignParameters looks for parameters that nobody will read.
func (t *teller) findForeignParameters(state *ClaimState) {
	// Those of an alternative that was not taken are rightly not read.
	if slices.ContainsFunc(state.Requests, func(r Request) bool { return strings.Contains(r.Name, "/") }) {
		return
	}
	for _, p := range state.Parameters {
		if p.Source != sourceClaim || slices.ContainsFunc(state.Devices, func(d Device) bool { return d.Driver == p.Driver }) {
			continue
		}
		var has []string
		for _, d := range state.Devices {
			if !slices.Contains(has, d.Driver) {
				has = append(has, d.Driver)
			}
		}
		t.missing(seePrepare, "correct the driver's name in the claim or its template, and delete the pod: a misspelt one means that VLAN or "+
			"network do not count",
			"claim %s: its parameters are for driver %q, but it has devices of %s, so that nobody reads them", state.PodClaim, p.Driver,
			strings.Join(has, ", "))
	}
}

// findReservation says whether another pod has the claim's devices.
func (t *teller) findReservation(state *ClaimState, claim *resourceapi.ResourceClaim) {
	if !slices.ContainsFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == t.pod.UID }) {
		isOther := func(r resourceapi.ResourceClaimConsumerReference) bool { return r.Resource != "pods" }
		other := slices.IndexFunc(claim.Status.ReservedFor, isOther)
		switch {
		case other >= 0:
			t.missing(seeGroup, "take the claim out of spec.resourceClaims of the PodGroup, and name a ResourceClaimTemplate in that of the pods "+
				"alone",
				"claim %s: it is reserved for %s %s, and a network device can only be given to one pod", state.PodClaim,
				strings.TrimSuffix(claim.Status.ReservedFor[other].Resource, "s"), claim.Status.ReservedFor[other].Name)
		case t.pod.Status.Phase == corev1.PodPending || t.pod.Status.Phase == corev1.PodRunning:
			t.missing(seeShared, "if it stays so, another pod uses the claim: make a claim for each pod, by a template",
				"claim %s: it is not reserved for this pod", state.PodClaim)
		}
		return
	}
	for i := range claim.Status.Devices {
		s := &claim.Status.Devices[i]
		holder := recordOf(s).PodUID
		if !t.isOurs(s.Driver) || holder == "" || holder == string(t.pod.UID) {
			continue
		}
		name := "of UID " + holder
		for _, r := range claim.Status.ReservedFor {
			if string(r.UID) == holder {
				name = r.Name
			}
		}
		t.missing(seeShared, "delete the other pod, make a claim for each pod by a template, or use the strategy Recreate: the device is "+
			"handed over when the other pod has ended",
			"claim %s: pod %s has device %s, and this one waits for it", state.PodClaim, name, s.Device)
		return
	}
}

func (t *teller) findInDevice(state *ClaimState, d *Device) {
	of := fmt.Sprintf("claim %s, device %s", state.PodClaim, d.Device)
	if d.State == StateAllotted {
		do := "see the events FailedPrepareDynamicResources, which say why; kubelet tries again every 60 to 90 seconds"
		if !slices.ContainsFunc(t.Events, func(e Event) bool { return e.Reason == "FailedPrepareDynamicResources" }) {
			do = "wait for kubelet to start the pod; if it does not, see whether kubelet and the driver's agent run on node " + t.pod.Spec.NodeName
		}
		t.missing(seePrepare, do, "%s: it is allotted, and the node has not prepared it", of)
	}
	if d.Use.state == "Prepared" {
		t.missing(seeCreating, "see the pod's events; while the agent is away or cut off from NRI, it waits",
			"%s: it is set up and not in the pod yet", of)
	}
	for _, p := range d.Problems {
		switch {
		case p.Kind == "slice":
			t.missing(seeNoDevices, "see why with kubectl get ndnc "+d.Node+" -o yaml (conditions, skippedDevices), and the NIC",
				"%s: the node does not offer it any more", of)
		case p.Kind == "taint":
			t.missing(seeHealth, "see the NIC, its cable and its driver on node "+d.Node+"; with effect NoSchedule the pod keeps the device, "+
				"delete the pod to get another one",
				"%s: taint %s", of, p)
		case p.Name == conditionReady:
			t.missing(seeNoInterface, "the message says what to do; it is tried again by itself", "%s: %s: %s", of, p.Value, p.Message)
		default:
			t.missing(seeHealth, "see the NIC, its cable and its driver on node "+d.Node+"; delete the pod to get another device",
				"%s: condition %s: %s", of, p, p.Message)
		}
	}
}

func (t *teller) findOnNode() {
	node := t.pod.Spec.NodeName
	switch {
	case node == "" || !t.configRead:
		return
	case t.config == nil:
		t.missing(seeNoDevices, "make one, or see why the operator does not: kubectl get ndnc,ndcc",
			"node %s has no NodeConfig: the driver is off there", node)
		return
	}
	for _, c := range t.config.Status.Conditions {
		bad := c.Status != metav1.ConditionTrue
		do, see := "the message says what to do; more: kubectl get ndnc "+node+" -o yaml", seeCondition
		switch c.Type {
		case v2alpha1.ConditionReady:
			see = seeAgent
			do = "until it is True nothing is prepared on the node; see the agent's pod and log"
		case v2alpha1.ConditionContainerGate:
			bad, see = c.Status == metav1.ConditionFalse, seeGate
		default:
			// Degraded, and what else is bad when it is True.
			bad = c.Status == metav1.ConditionTrue
		}
		if bad {
			t.missing(see, do, "node %s: %s is %s (%s): %s", node, c.Type, c.Status, c.Reason, c.Message)
		}
	}
	if len(t.config.Status.Conditions) == 0 {
		t.missing(seeAgent, "see whether the agent runs on the node", "node %s: no agent has said anything about its NodeConfig", node)
	}
}

func (t *teller) findInNetworks() {
	if !t.networksRead {
		return
	}
	for _, state := range t.Networks {
		n := t.networks[state.Name]
		if n == nil {
			t.missing(seePrepare, "create it, or correct the name: kubectl get ndnet",
				"network %s: there is no CiliumNetworkDriverNetwork of this name", state.Name)
			continue
		}
		if ready := meta.FindStatusCondition(n.Status.Conditions,
			v2alpha1.ConditionReady); ready != nil && ready.Status == metav1.ConditionFalse {
			t.missing(seeCondition, "whoever administers networks has to change it", "network %s: claims cannot join it (%s): %s", n.Name,
				ready.Reason, ready.Message)
		}
		t.findMayJoin(n)
		if len(n.Spec.Subnets) > 0 && n.Status.FreeAddresses == 0 && n.Status.UsedAddresses > 0 && len(state.Addresses) == 0 {
			t.missing(seeNetworks, "end pods that have one, or add a subnet or range: kubectl get ndaddr",
				"network %s: it has no address left, %d are used", n.Name, n.Status.UsedAddresses)
		}
		for _, a := range state.Addresses {
			if a.PodUID != string(t.pod.UID) && a.State == v2alpha1.AddressInUse {
				t.missing("use.md#the-same-address-for-the-next-pod-of-the-name", "wait until node "+a.Node+" has released it",
					"network %s: address %s is still that of a former pod of this name", n.Name, a.Address)
			}
		}
	}
}

func (t *teller) findMayJoin(n *v2alpha1.CiliumNetworkDriverNetwork) {
	if t.namespace != nil && n.Spec.NamespaceSelector != nil {
		selector, err := metav1.LabelSelectorAsSelector(n.Spec.NamespaceSelector.AsLabelSelector())
		if err == nil && !selector.Matches(labels.Set(t.namespace.Labels)) {
			t.missing(seePrepare, "an administrator labels the namespace, if it may join",
				"network %s: claims of namespace %s may not join it, its namespaceSelector asks for %s", n.Name, t.namespace.Name, selector)
		}
	}
	if len(n.Spec.Pools) == 0 {
		return
	}
	for _, claim := range t.Claims {
		for _, d := range claim.Devices {
			if t.isOurs(d.Driver) && claim.asksFor(n.Name, d.Use.Request) && !slices.Contains(n.Spec.Pools, d.Pool) {
				t.missing(seePrepare, "a class that chooses devices of "+strings.Join(n.Spec.Pools, ", ")+", or add the pool to the network",
					"network %s: device %s is of pool %s, which is not on its wire", n.Name, d.Device, d.Pool)
			}
		}
	}
}

// asksFor says whether a parameter of the claim names the network for the request.
func (c *ClaimState) asksFor(network, request string) bool {
	parent, _, _ := strings.Cut(request, "/")
	return slices.ContainsFunc(c.Parameters, func(p Parameter) bool {
		return networkOf(p) == network &&
			(len(p.Requests) == 0 || slices.Contains(p.Requests, request) || slices.Contains(p.Requests, parent))
	})
}

// networkOf returns the network that the parameters name, if they can be read.
func networkOf(p Parameter) string {
	var values struct {
		Network string `json:"network"`
	}
	if p.Values == nil || json.Unmarshal(p.Values.Raw, &values) != nil {
		return ""
	}
	return values.Network
}
